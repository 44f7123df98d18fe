"""`python -m workers.bench_invariance`: what batch invariance costs the native engine. Run by the executor.

Two engines over one checkpoint, with and without it, run the same steps in turns. It knows no executor.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ipc import vocabulary
from ipc.messages import LaneSpec, SamplingSpec
from workers import guard
from workers.engines.engine import Draw, Window
from workers.engines.native import NativeEngine
from workers.lifecycle import made_ready

if TYPE_CHECKING:
    from collections.abc import Sequence

_SEQ = 0
_WARM_UP_STEPS = 3
_GREEDY = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)


class Stepper:
    """One engine with one sequence whose context is cached, so that steps after it can be repeated."""

    def __init__(self, spec: LaneSpec, context: Sequence[int], *, invariant: bool) -> None:
        """Raises ValueError, OSError."""
        self._engine = made_ready(NativeEngine(spec, invariant=invariant))
        self._context = len(context)
        self._engine.open(_SEQ)
        self._engine.forward([Window(_SEQ, 0, context, 0)])

    def step_ms(self, tokens: Sequence[int]) -> float:
        """Milliseconds of running these tokens after the context, with logits and a greedy sample of each."""
        began = time.perf_counter()
        rows = self._engine.forward([Window(_SEQ, self._context, tokens, len(tokens))])
        self._engine.sample(rows, [Draw(_GREEDY, self._context + i, i) for i in range(len(tokens))])
        return (time.perf_counter() - began) * 1000


def measure(spec: LaneSpec, context: int, widths: Sequence[int], repeats: int) -> dict[str, Any]:
    """For each number of rows the medians of step times in milliseconds, and their ratio.

    Raises ValueError, OSError.
    """
    draw, size = random.Random(0), vocabulary.read(Path(spec.model)).size
    tokens = [draw.randrange(size) for _ in range(context + max(widths))]
    steppers = {
        name: Stepper(spec, tokens[:context], invariant=name == "invariant")
        for name in ("plain", "invariant")
    }
    times: dict[tuple[str, int], list[float]] = {(name, width): [] for name in steppers for width in widths}
    for i in range(_WARM_UP_STEPS + repeats):
        for (name, width), several in times.items():
            milliseconds = steppers[name].step_ms(tokens[context : context + width])
            if i >= _WARM_UP_STEPS:
                several.append(milliseconds)
    rows = []
    for width in widths:
        plain, invariant = (statistics.median(times[name, width]) for name in steppers)
        rows.append(
            {
                "rows": width,
                "plain_ms": round(plain, 3),
                "invariant_ms": round(invariant, 3),
                "cost_ratio": round(invariant / plain, 4),
            }
        )
    return {"context": context, "repeats": repeats, "rows": rows}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m workers.bench_invariance", description=__doc__)
    parser.add_argument("--spec", required=True, help="the lane's spec as JSON")
    parser.add_argument("--context", required=True, type=int)
    parser.add_argument("--rows", required=True, type=int, nargs="+")
    parser.add_argument("--repeats", required=True, type=int)
    parser.add_argument("--parent-pid", required=True, type=int)
    parser.add_argument("--death-fd", required=True, type=int)
    args = parser.parse_args(argv)
    guard.die_with(args.parent_pid, args.death_fd)
    spec = msgspec.json.decode(args.spec, type=LaneSpec)
    try:
        result = measure(spec, args.context, args.rows, args.repeats)
    except (ValueError, OSError) as error:
        sys.stderr.write(" ".join(str(error).split()) + "\n")
        return 1
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
