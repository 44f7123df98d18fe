"""How near a run came to what its two lanes could do at best, and where the rest of the time went."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.llm import LLM
    from executor.setting import Setting
    from executor.stats import RoundTime


@dataclass(frozen=True, slots=True)
class Counters:
    """Of an executor, since its start. Times in nanoseconds."""

    hits: int
    misses: int
    target_ns: int
    speculator_ns: int

    @classmethod
    def of(cls, llm: LLM) -> Counters:
        stats, busy = llm.coordinator.stats, llm.coordinator.lane_times.busy_ns
        return cls(stats.hits, stats.misses, busy["target"], busy["speculator"])

    def since(self, before: Counters) -> Counters:
        return Counters(
            self.hits - before.hits,
            self.misses - before.misses,
            self.target_ns - before.target_ns,
            self.speculator_ns - before.speculator_ns,
        )


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Of one run. draft_step: seconds of a draft step for all sequences at once; None if none was waited
    for.
    """

    counters: Counters
    seconds: float
    tokens: int
    round_times: list[RoundTime]
    draft_step: float | None
    setting: Setting


def occupancy(llm: LLM, before: Counters, seconds: float, tokens: int) -> Occupancy:
    coordinator = llm.coordinator
    costs, batch = coordinator.controller.costs, llm.config.max_sequences
    k = coordinator.controller.current.k
    return Occupancy(
        Counters.of(llm).since(before),
        seconds,
        tokens,
        list(coordinator.stats.round_times),
        costs.draft(batch, k) / k if costs.draft_known and k else None,
        coordinator.controller.current
        if llm.config.speculates
        else coordinator.controller.current._replace(k=0),
    )


def alone(runs: Sequence[Occupancy]) -> float:
    """Seconds that the target computes in a round, by the median."""
    return statistics.median(time.verify for run in runs for time in run.round_times) / 1e9


def report(runs: Sequence[Occupancy], length: float, verify_alone: float) -> dict[str, Any]:
    """`length`: tokens per sequence and round. `verify_alone`: seconds of a verification of such drafts while
    the speculator does nothing.

    The ceiling of two devices is sequences · length / max(K · t_draft, t_verify): whichever lane has more to
    do never waits. `loss` are shares of the time: the way to the target and back, this process, the target
    without a draft to verify, and what it is slower while the speculator computes.
    """
    last = runs[-1]
    setting = last.setting
    times = [time for run in runs for time in run.round_times]
    total = sum(time.total for time in times) or 1
    verify, wire, waited = (
        sum(getattr(time, part) for time in times) for part in ("verify", "wire", "waited")
    )
    sequences = statistics.fmean(time.sequences for time in times)
    seconds = sum(run.seconds for run in runs)
    hits, misses = (sum(getattr(run.counters, part) for run in runs) for part in ("hits", "misses"))
    step = last.draft_step if setting.k else 0.0
    slowest = max(setting.k * (step or 0.0), verify_alone)
    ceiling = sequences * length / slowest
    # Each part of the sequences has its own rounds, and both run at once.
    rate = sum(run.tokens for run in runs) / seconds * (setting.ubatches if setting.ubatches > 1 else 1)
    busy = {
        name: round(sum(getattr(run.counters, f"{name}_ns") for run in runs) / 1e9 / seconds, 4)
        for name in ("target", "speculator")
    }
    contention = max(0.0, verify - verify_alone * 1e9 * len(times))
    return {
        "ceiling_share": round(min(1.0, rate / ceiling), 4),
        "hit_rate": round(hits / (hits + misses), 4) if hits + misses else None,
        "c": round(step / verify_alone, 4) if step is not None and setting.k else None,
        "k": setting.k,
        "n": setting.hypotheses,
        "busy": busy,
        "loss": {
            "wire": round(wire / total, 4),
            "coordinator": round(max(0.0, total - verify - wire - waited) / total, 4),
            "bubble": round(waited / total, 4),
            "contention": round(contention / total, 4),
        },
    }
