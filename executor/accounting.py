"""What a round came to, for those who keep account of it: totals, controller, alarm, trace.

That happens once both lanes have their next orders, so that it costs no lane any time.
"""

from __future__ import annotations

from logging import WARNING
from typing import TYPE_CHECKING, NamedTuple

from executor.controller import Round
from executor.events import record
from executor.stats import RoundTime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.collapse import Collapse
    from executor.controller import Controller
    from executor.costs import Outcome
    from executor.drafting import Made, Wait
    from executor.lanes import Lanes
    from executor.plan import Step
    from executor.setting import Setting
    from executor.stats import Stats
    from executor.trace import Trace


class Ended(NamedTuple):
    """A round, from when the target had answered the one before until it answered this one.

    Times in seconds, monotonic where they are points in time. drafted_at: for each of the plan, when its
    draft came, 0 if none did. outcomes: of those that were judged. setting: by which it was run, while so
    many sequences were `running`. answered: see controller.Round. reads: whether history was run that no lane
    had seen; read: whether that was so in the round before.
    wait: for drafts, while the target had nothing to do. made: the last draft that was waited for, if any.
    busy, wire: of the verification, what the target computed and what it took besides.
    """

    plan: Sequence[Step]
    drafted_at: Sequence[float]
    outcomes: Sequence[Outcome]
    setting: Setting
    running: int
    answered: bool
    reads: bool
    read: bool
    began: float
    ended: float
    committed: float
    asked: float
    wait: Wait
    made: Made | None
    busy: float
    wire: float

    @property
    def rows(self) -> int:
        """Of logits that were judged."""
        return sum(outcome.drafted + 1 for outcome in self.outcomes)


class Accounting:
    """`collapse`: watches the speculator that there is, if one is watched."""

    def __init__(self, lanes: Lanes, stats: Stats, controller: Controller, trace: Trace | None) -> None:
        self._lanes = lanes
        self._stats = stats
        self._controller = controller
        self._trace = trace
        self._guesses = 0, 0
        self._flows = 0
        self.collapse: Collapse | None = None

    def note(self, done: Ended) -> None:
        self._count(done)
        if self._trace is not None:
            self._draw(self._trace, done)
        if not done.reads and len(done.outcomes) == len(done.plan):
            # What is read once says nothing of what comes.
            self._tell_controller(done)

    def _count(self, done: Ended) -> None:
        stats = self._stats
        total, draft, verify, wire = (
            round(seconds * 1e9)
            for seconds in (done.ended - done.began, done.wait.computed, done.busy, done.wire + done.wait.way)
        )
        self._lanes.times.round_ended(total, [lane.name for lane in self._lanes.all if lane.serving])
        stats.rounds += 1
        stats.round_ns += total
        stats.draft_ns += draft
        stats.verify_ns += verify
        stats.round_times.append(
            RoundTime(
                *(total, draft, verify, wire),
                sequences=len(done.plan),
                running=done.running,
                rows=done.rows,
                tokens=sum(outcome.tokens for outcome in done.outcomes),
                reads=done.reads,
            )
        )

    def watch_acceptance(self, outcomes: Sequence[Outcome]) -> None:
        """Of a round, before anything is asked of a speculator that may have to start again."""
        speculator = self._lanes.speculator
        if self.collapse is None or speculator is None or speculator.engine in ("ngram", "suffix"):
            return  # what a lookup is worth hangs on the text, and starting it again changes nothing
        stood = bool(self.collapse.alarm)
        restart = self.collapse.note(speculator.epoch, *_totals(outcomes))
        if self.collapse.alarm and not stood:
            record(WARNING, "acceptance_collapsed", epoch=speculator.epoch, reason=self.collapse.alarm)
        if restart and speculator.serving:
            self._lanes.supervisor.take_down(speculator, self.collapse.alarm)

    def _draw(self, trace: Trace, done: Ended) -> None:
        drafted, accepted = _totals(done.outcomes)
        what = {"sequences": len(done.plan), "drafted": drafted, "accepted": accepted}
        answered = done.asked + done.busy + done.wire
        trace.work("target", "verify", done.asked, answered, done.busy, **what)
        trace.own("commit", done.ended, done.committed, setting=str(done.setting))
        for drafted_at in filter(None, done.drafted_at):
            way = ("speculator", drafted_at), ("target", answered), ("coordinator", done.committed)
            self._flows += 1
            trace.flow(self._flows, way)
        hits, misses = self._stats.hits, self._stats.misses
        figures = {"acceptance": accepted / drafted if drafted else 0.0}
        figures["hit rate"] = hits / (hits + misses) if hits + misses else 0.0
        trace.count("shares", done.committed, figures)
        trace.count("setting", done.committed, {"K": done.setting.k, "N": done.setting.hypotheses})

    def _tell_controller(self, done: Ended) -> None:
        hits, misses = self._stats.hits, self._stats.misses
        before, self._guesses = self._guesses, (hits, misses)
        # After a round that read, the speculator had all that to read, too, before it could draft.
        steps, draft, way = (0, 0.0, None) if done.made is None else done.made
        round_ = Round(
            setting=done.setting,
            running=done.running,
            outcomes=done.outcomes,
            rows=done.rows,
            total=done.ended - done.began,
            verify=done.busy,
            waited=done.wait.computed + done.wait.way,
            draft_steps=0 if done.read else steps,
            draft=draft,
            hits=hits - before[0],
            misses=misses - before[1],
            answered=done.answered or done.setting.k == 0,
            way=way,
        )
        self._controller.note(round_, done.ended)
        self._stats.hypotheses = self._controller.current.hypotheses


def _totals(outcomes: Sequence[Outcome]) -> tuple[int, int]:
    """Tokens drafted, and accepted."""
    return sum(outcome.drafted for outcome in outcomes), sum(outcome.accepted for outcome in outcomes)
