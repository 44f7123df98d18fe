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

_ENOUGH = 3
"""Verifications of as many rows, of which the median counts."""


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
    for. batch: sequences that may run at once.
    """

    counters: Counters
    seconds: float
    tokens: int
    round_times: list[RoundTime]
    draft_step: float | None
    setting: Setting
    batch: int

    @property
    def decoding(self) -> list[RoundTime]:
        """Rounds in which nothing was read: those that drafts can make fewer."""
        return [time for time in self.round_times if not time.reads]


def occupancy(llm: LLM, before: Counters, seconds: float, tokens: int) -> Occupancy:
    coordinator = llm.coordinator
    costs, batch = coordinator.controller.costs, llm.config.max_sequences
    setting = coordinator.controller.current
    k = setting.k
    return Occupancy(
        Counters.of(llm).since(before),
        seconds,
        tokens,
        list(coordinator.stats.round_times),
        costs.draft(batch, k) / k if costs.draft_known and k else None,
        setting if llm.config.speculates else setting._replace(k=0),
        batch,
    )


class Alone:
    """What a verification takes while the speculator does nothing, by the rows of logits that it runs."""

    def __init__(self, runs: Sequence[Occupancy]) -> None:
        """`runs`: in which lanes took turns, with one decoding round or more."""
        seen: dict[int, list[int]] = {}
        for time in (time for run in runs for time in run.decoding):
            seen.setdefault(time.rows, []).append(time.verify)
        self._medians = {rows: statistics.median(times) / 1e9 for rows, times in seen.items()}
        self._sure = {rows for rows, times in seen.items() if len(times) >= _ENOUGH}

    def __bool__(self) -> bool:
        return bool(self._medians)

    def at(self, rows: int) -> float:
        """Seconds: the median, or where few were seen what lies between those of fewer and of more rows."""
        if rows in self._sure or len(self._sure) < 2:
            return self._medians.get(rows) or self._medians[min(self._medians, key=lambda r: abs(r - rows))]
        below = max((r for r in self._sure if r < rows), default=min(self._sure))
        above = min((r for r in self._sure if r > rows), default=max(self._sure))
        if above == below:
            return self._medians[below]
        slope = (self._medians[above] - self._medians[below]) / (above - below)
        return self._medians[below] + slope * (rows - below)


def report(runs: Sequence[Occupancy], alone: Alone, plain: Alone | None) -> dict[str, Any]:
    """`alone`: of verifications of such drafts. `plain`: of rounds without drafts, if there were any.

    With two devices a round would take max(K · t_draft, t_verify): whichever lane has more to do never waits.
    `ceiling_share` is that over what rounds took, of all that read nothing; the tokens are the same.
    `ceiling_tok_s`: what the whole run would have come to. `v`: a verification in plain steps of as many
    sequences. `loss` are shares of the time: the way to the lanes and back, this process, the target waiting
    for what the speculator computes, and what it is slower while the speculator computes.
    """
    last = runs[-1]
    setting = last.setting
    parts = setting.ubatches if last.batch > 1 else 1
    step = last.draft_step if setting.k else 0.0
    times = [time for run in runs for time in run.decoding]
    total = sum(time.total for time in times) / 1e9
    verify = sum(alone.at(time.rows) for time in times)
    # A part of the sequences at a time costs more than all at once.
    ideal = sum(max(setting.k * (step or 0.0), alone.at(parts * time.rows)) / parts for time in times)
    loss = {part: sum(getattr(time, part) for time in times) / 1e9 for part in ("wire", "coordinator")}
    loss["bubble"] = sum(time.draft for time in times) / 1e9
    loss["contention"] = max(0.0, sum(time.verify for time in times) / 1e9 - verify)
    seconds, tokens = (sum(getattr(run, part) for run in runs) for part in ("seconds", "tokens"))
    hits, misses = (sum(getattr(run.counters, part) for run in runs) for part in ("hits", "misses"))
    busy = {
        name: round(sum(getattr(run.counters, f"{name}_ns") for run in runs) / 1e9 / seconds, 4)
        for name in ("target", "speculator")
    }
    steps = sum(plain.at(time.sequences) for time in times) if plain else 0.0
    known = step is not None and setting.k > 0 and steps > 0
    return {
        "ceiling_share": round(min(1.0, ideal / total), 4) if total else None,
        "ceiling_tok_s": round(tokens / max(1e-9, seconds - max(0.0, total - ideal)), 3),
        "hit_rate": round(hits / (hits + misses), 4) if hits + misses else None,
        "c": round(len(times) * (step or 0.0) / steps, 4) if known else None,
        "v": round(verify / steps, 4) if steps else None,
        "k": setting.k,
        "n": setting.hypotheses,
        "busy": busy,
        "loss": {part: round(lost / total, 4) if total else 0.0 for part, lost in loss.items()},
    }
