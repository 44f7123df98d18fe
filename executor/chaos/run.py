"""A chaos run: rounds of the same traffic under faults, every token compared with the undisturbed run's."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from executor.chaos.census import census, left_behind, resident_bytes
from executor.chaos.gaps import Gaps
from executor.chaos.injector import Injector
from executor.chaos.plan import make_faults, make_jobs
from executor.chaos.reference import make_reference
from executor.chaos.traffic import run_round
from executor.llm import LLM

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor.chaos.plan import Job, Plan
    from executor.chaos.reference import Reference
    from executor.chaos.traffic import Outcome
    from ipc.messages import LaneName

_WARM_UP_SHARE = 0.1
_PATIENCE_SECONDS = 60.0
"""How long a lane may take to come back, beyond the time after which it counts as hung."""
_POLL_SECONDS = 0.01
_NEWS_SECONDS = 10.0
_PROBES = 4


class Prepared(NamedTuple):
    """Executors that are not started yet, the undisturbed one and the other, and the traffic."""

    undisturbed: LLM
    llm: LLM
    jobs: list[Job]


def prepare(plan: Plan) -> Prepared:
    """Finds the models, starts nothing. Raises InvalidConfig or InvalidRequest."""
    undisturbed = LLM(replace(plan.config, speculator="off"))
    llm = LLM(plan.config)
    return Prepared(undisturbed, llm, make_jobs(llm, plan))


def measure(plan: Plan, prepared: Prepared, progress: Callable[[str], None]) -> dict[str, Any]:
    """The reference, then the run; what came of it. Raises LaneFailed if the lanes do not start."""
    before = census()
    reference = make_reference(prepared.undisturbed, prepared.jobs, plan.config.max_sequences)
    progress(f"reference: {len(reference.outputs)} requests, {reference.step_seconds * 1e3:.2f} ms a step")
    with prepared.llm as llm:
        run = Run(plan, llm, prepared.jobs, reference, progress)
        run.rounds()
        recovered = run.settle() and run.probe()
        run.count_deaths()
        drift = run.rss_drift()
    return run.result() | {"recovered": recovered, "leaks": left_behind(before), "rss_drift": drift}


@dataclass(slots=True)
class Tally:
    """Outcomes so far. failed: ended with an error; mismatches: saw another token, or one too many or few."""

    requests: int = 0
    mismatches: int = 0
    failed: int = 0


class Run:
    def __init__(
        self,
        plan: Plan,
        llm: LLM,
        jobs: Sequence[Job],
        reference: Reference,
        progress: Callable[[str], None],
    ) -> None:
        """`llm` serves already."""
        self._plan = plan
        self._llm = llm
        self._jobs = jobs
        self._reference = reference
        self._progress = progress
        self._injector = Injector(lambda: llm.coordinator.lanes)
        self._lock = threading.Lock()
        self._gaps = Gaps()
        self._tally = Tally()
        self._round_tokens = sum(map(len, reference.outputs))
        self._round = 0
        self._began = self._last_news = time.monotonic()
        self._warm_bytes = 0
        self._deaths: dict[LaneName, int] = {}

    def rounds(self) -> None:
        """Traffic until the time is up and all faults have struck, or nothing can be served any more."""
        end = self._began + self._plan.minutes * 60
        patience_ends = 0.0
        while not self._lost:
            now = time.monotonic()
            if not self._injector.pending:
                if self._round and now >= end:
                    return
                faults = make_faults(self._plan, self._round, self._injector.tokens, self._round_tokens)
                self._injector.add(faults)
                patience_ends = now + self._patience
            elif now >= patience_ends:
                break
            self._one_round(self._jobs, self._reference.outputs)
            self._round += 1
        if self._injector.pending:
            self._progress(f"warning: {self._injector.pending} faults found no lane to strike")

    def settle(self) -> bool:
        """Wait until every lane serves; whether that came true in time."""
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline and not self._lost:
            self._injector.look()
            if self._injector.all_back and all(lane.serving for lane in self._llm.coordinator.lanes):
                return True
            time.sleep(_POLL_SECONDS)
        return False

    def probe(self) -> bool:
        """Serve a few requests more, until all lanes took part in it; whether that came true in time.

        On a loaded machine short answers may end before the speculator has read the prompts.
        """
        deadline = time.monotonic() + self._patience
        while not self._lost and time.monotonic() < deadline:
            if self._served_by_all():
                return True
        return False

    def count_deaths(self) -> None:
        """To be called at the end, while the executor still runs."""
        self._deaths = self._llm.coordinator.deaths
        more = sum(self._deaths.values()) - len(self._injector.events)
        if more > 0:
            self._progress(f"warning: {more} deaths of lanes that no fault explains")

    def rss_drift(self) -> float:
        """Relative change of the coordinator's resident memory since the end of the warm-up."""
        return round(resident_bytes() / self._warm_bytes - 1, 4) if self._warm_bytes else 0.0

    def result(self) -> dict[str, Any]:
        """What JSON shows, but for what is known only after the end."""
        kills = self._injector.counts(signal.SIGKILL)
        stops = self._injector.counts(signal.SIGSTOP)
        return {
            "mismatches": self._tally.mismatches,
            "failed": self._tally.failed,
            "kills": {"speculator": kills["speculator"], "target": kills["target"]},
            "stops": {"speculator": stops["speculator"]},
            "deaths": {lane: self._deaths.get(lane, 0) for lane in ("speculator", "target")},
            "stall_steps": self._stalls(),
            "step_ms": round(self._reference.step_seconds * 1e3, 4),
            "requests": self._tally.requests,
            "tokens": self._injector.tokens,
            "rounds": self._round,
            "seconds": round(time.monotonic() - self._began, 3),
            "events": [
                {
                    "lane": event.kind.lane,
                    "signal": event.kind.signal.name,
                    "tokens": event.tokens,
                    "seconds": round(event.seconds, 3),
                    "back_seconds": round(event.back_seconds, 3) if event.back_seconds is not None else None,
                }
                for event in self._injector.events
            ],
        }

    # ------------------------------------------------------------ inside

    @property
    def _lost(self) -> bool:
        return self._llm.coordinator.health.state == "failed"

    @property
    def _patience(self) -> float:
        timeouts = self._plan.config.timeouts
        return max(timeouts.hang, timeouts.verify) + _PATIENCE_SECONDS

    def _one_round(self, jobs: Sequence[Job], expected: Sequence[list[int]]) -> None:
        outcomes = run_round(self._llm, jobs, self._plan.config.max_sequences, self._watch)
        for i, (outcome, reference) in enumerate(zip(outcomes, expected, strict=True)):
            self._judge(i, outcome, reference)
        self._tell()

    def _served_by_all(self) -> bool:
        count = min(_PROBES, len(self._jobs))
        stats, before = self._llm.coordinator.stats, self._llm.coordinator.lanes
        asked, missed = [lane.orders for lane in before], stats.missed
        self._one_round(self._jobs[:count], self._reference.outputs[:count])
        return (
            self._llm.coordinator.lanes == before
            and all(lane.orders > orders for lane, orders in zip(before, asked, strict=True))
            and stats.missed == missed
        )

    def _judge(self, number: int, outcome: Outcome, reference: Sequence[int]) -> None:
        self._tally.requests += 1
        where = f"request {number} of round {self._round}"
        if outcome.failure is not None:
            self._tally.failed += 1
            self._progress(f"warning: {where} failed: {outcome.failure}")
        elif (position := outcome.first_difference(reference)) is not None:
            self._tally.mismatches += 1
            self._progress(f"warning: {where} differs from the undisturbed run at token {position}")

    def _watch(self, tokens: int, gap: float | None) -> None:
        self._injector.committed(tokens)
        with self._lock:
            if gap is not None:
                self._gaps.record(gap)
            if not self._warm_bytes and self._done() >= _WARM_UP_SHARE:
                self._warm_bytes = resident_bytes()

    def _done(self) -> float:
        """Which part of the run is over."""
        if self._plan.minutes:
            return (time.monotonic() - self._began) / (self._plan.minutes * 60)
        return self._injector.tokens / self._round_tokens

    def _stalls(self) -> dict[str, float]:
        step = self._reference.step_seconds
        longest = {"p50": self._gaps.percentile(0.5), "p99": self._gaps.percentile(0.99)}
        longest["max"] = self._gaps.longest
        return {name: round(seconds / step, 2) if step else 0.0 for name, seconds in longest.items()}

    def _tell(self) -> None:
        now = time.monotonic()
        if self._round and now - self._last_news < _NEWS_SECONDS:
            return
        self._last_news = now
        tally, faults = self._tally, len(self._injector.events)
        self._progress(
            f"{tally.requests} requests, {self._injector.tokens} tokens in {now - self._began:.0f} s, "
            f"{faults} faults, {tally.mismatches} mismatches, {tally.failed} failed"
        )
