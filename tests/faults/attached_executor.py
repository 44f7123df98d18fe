"""An executor in a process of its own that streams for ever: `attached_executor.py ADDRESS`. To be killed."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from pooled import attached

from executor import SamplingParams

if __name__ == "__main__":
    with attached(sys.argv[1]) as llm:
        for seed in count():
            for _ in llm.stream("to be killed", SamplingParams(seed=seed, max_tokens=256)):
                if sum(llm.coordinator.stats.acceptance.accepted) and seed == 0:
                    sys.stdout.write("drafted\n")
                    sys.stdout.flush()
