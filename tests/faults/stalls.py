"""How long a stream pauses when a lane is killed or stopped: `python tests/faults/stalls.py --help`.

Run by hand, with nothing else on the machine. Gaps are the times between two deltas of one stream, in units
of the median plain step: what the target needs for a token without speculation.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from executor import LLM, Recovery, RestartPolicy, SamplingParams, Timeouts

if TYPE_CHECKING:
    from executor.lane import Lane

RECOVERY = Recovery(policy=RestartPolicy(intensity=10**6, backoff=0.01, backoff_max=0.05))
PARAMS = SamplingParams(max_tokens=3500, temperature=0.9, seed=1)
CALM_SECONDS = 0.5
"""How long all must have been well before the next fault, and how long after a fault its gaps are its own."""


class Gap(NamedTuple):
    end: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="of each kind")
    parser.add_argument("--step-ms", type=float, default=10.0, help="of a forward pass of the target")
    parser.add_argument(
        "--draft", type=float, default=Timeouts().draft, help="seconds a round waits for drafts"
    )
    args = parser.parse_args()
    target = f"vocabulary=256,step_ms={args.step_ms}"
    with LLM(engine="toy", target=target, speculator="off", threads=1) as llm:
        step = statistics.median(gap.seconds for gap in gaps_of(llm, 200))
    report = {"plain_step_ms": round(step * 1e3, 2), "draft_seconds": args.draft}
    for lane, number in [("speculator", 0), ("speculator", 9), ("speculator", 19), ("target", 9)]:
        kind = f"{lane} {signal.Signals(number).name}" if number else "undisturbed"
        report[kind] = measure(target, args, lane, number, step)
        sys.stderr.write(f"{kind}: {report[kind]}\n")
    sys.stdout.write(json.dumps(report, indent=2) + "\n")


def gaps_of(llm: LLM, count: int) -> list[Gap]:
    gaps: list[Gap] = []
    last = time.perf_counter()
    for _ in llm.stream("stalls", PARAMS):
        now = time.perf_counter()
        gaps.append(Gap(now, now - last))
        last = now
        if len(gaps) > count:
            break
    return gaps[1:]


def measure(target: str, args: argparse.Namespace, name: str, number: int, step: float) -> dict[str, float]:
    """Of all gaps, and of the longest that each fault caused, in steps."""
    timeouts = Timeouts(draft=args.draft, hang=max(1.0, 2 * args.draft))
    longest: list[float] = []
    every: list[float] = []
    with LLM(
        engine="toy",
        target=target,
        speculator="vocabulary=256,agree=0.8,step_ms=1",
        threads=1,
        timeouts=timeouts,
        recovery=RECOVERY,
    ) as llm:
        while len(longest) < args.faults:
            struck, victim = 0.0, ""
            well_since = last = time.perf_counter()
            for _ in llm.stream("stalls", PARAMS):
                now = time.perf_counter()
                every.append(now - last)
                if struck:
                    longest[-1] = max(longest[-1], now - last)
                last = now
                healthy = llm.coordinator.health.state == "healthy"
                lane = lane_of(llm, name)
                if not healthy or lane.epoch == victim or (struck and now - struck < CALM_SECONDS):
                    well_since = now
                    continue
                struck = 0.0
                if now - well_since >= CALM_SECONDS:
                    if len(longest) >= args.faults:
                        break
                    struck = now
                    longest.append(0.0)
                    if number and lane.process is not None:
                        victim = lane.epoch
                        lane.process.kill(signal.Signals(number))
    return {
        **{f"gaps_{key}": value for key, value in quantiles(every, step).items()},
        **{f"faults_{key}": value for key, value in quantiles(longest, step).items()},
        "deaths": sum(llm.coordinator.deaths.values()),
        "missed": llm.coordinator.stats.missed,
    }


def lane_of(llm: LLM, name: str) -> Lane:
    return next(lane for lane in llm.coordinator.lanes if lane.name == name)


def quantiles(seconds: list[float], step: float) -> dict[str, float]:
    ordered = sorted(seconds)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(int(share * len(ordered)), len(ordered) - 1)] / step, 2)
        for name, share in at.items()
    }


if __name__ == "__main__":
    main()
