"""What a lane's death, pause or replacement costs a client: gaps in its stream, time until drafts are back.

One stream after the other, one disturbance at a time, each only once all has been well for a while. Gaps are
the times between two deltas of one stream, in units of the plain step: a token's time without speculation.
"""

from __future__ import annotations

import signal
import statistics
import threading
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from executor.bench.letting_go import LettingGo, Released
from executor.bench.percentile import percentile
from executor.config import Recovery, Timeouts
from executor.llm import LLM
from executor.restart import RestartPolicy
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from executor.config import Config
    from executor.lane import Lane
    from ipc.messages import LaneName

CALM_SECONDS = 0.5
"""How long all must have been well before the next disturbance; gaps so long after one are its own."""
_PLAIN_STEPS = 100
_ALWAYS = Recovery(policy=RestartPolicy(intensity=10**6, backoff=0.01, backoff_max=0.05))
_NEVER = Recovery(policy=RestartPolicy(intensity=0))
_IMPATIENT = Timeouts(draft=1.0, hang=1.0)
"""One that was stopped is given up after a second, so that many stops take no hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`times`: how often each disturbance happens, and how many runs `degraded_share` is the median of."""

    config: Config
    prompt: str
    times: int
    new_tokens: int
    seed: int = 1

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.new_tokens, temperature=0.9, seed=self.seed, ignore_eos=True)


class Disturbance(NamedTuple):
    """Something that is done to a lane, after which another incarnation is to serve in its place."""

    name: str
    lane: LaneName
    act: Callable[[LLM, Lane], object]


class Aftermath(NamedTuple):
    """In seconds: the longest gap, and for a lane that came back, from the disturbance to its first accepted
    draft or verdict, and what of that was its load. `released`: of a lane that was killed."""

    longest_gap: float
    back: float
    load: float
    released: Released | None


def _send(number: signal.Signals) -> Callable[[LLM, Lane], object]:
    return lambda _, lane: lane.process is not None and lane.process.kill(number)


def _swap(llm: LLM, _: Lane) -> None:
    threading.Thread(target=llm.swap_speculator, args=(llm.config.speculator,)).start()


_kill = _send(signal.SIGKILL)

DISTURBANCES = (
    Disturbance("speculator_killed", "speculator", _kill),
    Disturbance("speculator_stopped", "speculator", _send(signal.SIGSTOP)),
    Disturbance("speculator_swapped", "speculator", _swap),
    Disturbance("target_killed", "target", _kill),
)


def measure(plan: Plan, progress: Callable[[str], None]) -> dict[str, Any]:
    """Raises LaneFailed."""
    with LLM(replace(plan.config, speculator="off")) as plain:
        gaps = _gaps(plain, plan)
        step = statistics.median(next(gaps) for _ in range(_PLAIN_STEPS))
    progress(f"plain step {step * 1e3:.2f} ms")
    result: dict[str, Any] = {"plain_step_ms": round(step * 1e3, 3), "times": plan.times}
    with LLM(replace(plan.config, recovery=_ALWAYS, timeouts=_IMPATIENT)) as llm:
        gaps = _gaps(llm, plan)
        calm = [_calm(llm, gaps) for _ in range(plan.times)]
        result["undisturbed"] = {"gap_steps": _percentiles(calm, step)}
        for disturbance in DISTURBANCES:
            happened = [_disturb(llm, gaps, disturbance) for _ in range(plan.times)]
            result[disturbance.name] = _row(happened, step)
            progress(f"{disturbance.name}: {result[disturbance.name]}")
    result["degraded_share"] = round(_degraded_share(plan), 4)
    return result


def _gaps(llm: LLM, plan: Plan) -> Iterator[float]:
    """Seconds between the deltas of one stream after the other, for ever."""
    while True:
        last = None
        for _ in llm.stream(plan.prompt, plan.params):
            now = time.perf_counter()
            if last is not None:
                yield now - last
            last = now


def _calm(llm: LLM, gaps: Iterator[float]) -> float:
    """Until all has been well for CALM_SECONDS; the longest gap in that time."""
    began, longest = time.perf_counter(), 0.0
    for gap in gaps:
        now = time.perf_counter()
        longest = max(longest, gap)
        if llm.coordinator.health.state != "healthy":
            began, longest = now, 0.0
        elif now - began >= CALM_SECONDS:
            break
    return longest


def _disturb(llm: LLM, gaps: Iterator[float], disturbance: Disturbance) -> Aftermath:
    """One disturbance, from a calm to the next."""
    _calm(llm, gaps)
    before = _lane(llm, disturbance.lane)
    assert before is not None, "all was well"
    accepted = longest = 0.0
    back: float | None = None
    watched = _watch(llm, disturbance)
    began = time.perf_counter()
    disturbance.act(llm, before)
    for gap in gaps:
        longest = max(longest, gap)
        now, lane = time.perf_counter(), _lane(llm, disturbance.lane)
        if lane is None or lane.epoch == before.epoch or not lane.serving or lane.orders == 0:
            accepted = sum(llm.coordinator.stats.acceptance.accepted)
        elif back is None and sum(llm.coordinator.stats.acceptance.accepted) > accepted:
            back = now - began
            load = lane.ready_at - lane.started_at
        if back is not None and now - began >= back + CALM_SECONDS:
            break
    assert back is not None, "streams end only by an error, which is raised"
    return Aftermath(longest, back, load, watched.since(began) if watched is not None else None)


def _watch(llm: LLM, disturbance: Disturbance) -> LettingGo | None:
    """Of a lane that is to be killed, and the other one."""
    pids = {lane.name: lane.pids[0] for lane in llm.coordinator.lanes}
    if disturbance.act is not _kill or len(set(pids.values())) < 2:
        return None
    (survivor,) = (pid for name, pid in pids.items() if name != disturbance.lane)
    return LettingGo(pids[disturbance.lane], survivor)


def _lane(llm: LLM, name: LaneName) -> Lane | None:
    return next((lane for lane in llm.coordinator.lanes if lane.name == name), None)


def _degraded_share(plan: Plan) -> float:
    """Speed with a speculator that is dead for good, over speed with none: the median over turns."""
    shares = []
    with (
        LLM(replace(plan.config, speculator="off")) as plain,
        LLM(replace(plan.config, recovery=_NEVER)) as degraded,
    ):
        speculator = _lane(degraded, "speculator")
        assert speculator is not None, "it has just begun to serve"
        _kill(degraded, speculator)
        while degraded.coordinator.health.state != "degraded":
            next(_gaps(degraded, plan))
        for _ in range(plan.times):
            shares.append(_seconds(plain, plan) / _seconds(degraded, plan))
    return statistics.median(shares)


def _seconds(llm: LLM, plan: Plan) -> float:
    gaps = _gaps(llm, plan)
    return sum(next(gaps) for _ in range(_PLAIN_STEPS))


def _row(happened: Sequence[Aftermath], step: float) -> dict[str, Any]:
    released = [one.released for one in happened if one.released is not None]
    unmapped = [one.unmapped for one in released if one.unmapped is not None]
    return {
        "gap_steps": _percentiles([one.longest_gap for one in happened], step),
        "back_seconds": _percentiles([one.back for one in happened], 1.0),
        "back_beyond_load_seconds": _percentiles([one.back - one.load for one in happened], 1.0),
        "unmapped_ms": _percentiles(unmapped, 1e-3) if unmapped else None,
        "ended_ms": _percentiles([one.ended for one in released], 1e-3) if released else None,
    }


def _percentiles(seconds: Sequence[float], unit: float) -> dict[str, float]:
    return {
        name: round(percentile(seconds, share) / unit, 3)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))
    }
