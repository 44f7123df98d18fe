"""A worker whose CUDA runtime is a fake: `python fake_cuda_worker.py FAULTS …`, then what a worker is told.

FAULTS is a JSON object of what makes the fake fail, by lane; see FakeCuda.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_cuda import FakeCuda

from ipc import cuda
from workers import __main__ as workers_main

if __name__ == "__main__":
    faults, *options = sys.argv[1:]
    lane = options[options.index("--lane") + 1]
    cuda.install(FakeCuda(**json.loads(faults).get(lane, {})))
    sys.exit(workers_main.main(options))
