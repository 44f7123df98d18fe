"""A worker with a toy whose logits are no numbers for sequences of one seed: `numerics_worker.py SEED …`."""

from __future__ import annotations

import sys

from workers.__main__ import main
from workers.engines.toy import ToyEngine

SEED = int(sys.argv[1])

_sample = ToyEngine.sample


def sample(self, rows, draws):
    for row, draw in enumerate(draws):
        if draw.sampling.seed == SEED:
            raise FloatingPointError(f"row {row}: no token can be sampled")
    return _sample(self, rows, draws)


ToyEngine.sample = sample

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
