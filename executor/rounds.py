"""The rounds: what each lane is given to do next, and what comes of it.

Each sequence goes the same way, plan → draft → verify → commit → publish, and both lanes are kept busy with
it: whenever one has answered, `collect` takes the answer and `turn` gives every idle lane its next order.
The target gets the sequences that have a draft, or for which none is worth waiting; the speculator those
that need one, else it prepares drafts for verdicts that are still to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor import dialogue
from executor.accounting import Accounting, Ended
from executor.commit import commit
from executor.costs import Outcome
from executor.drafting import Drafting, Wait
from executor.errors import RequestFailed
from executor.plan import Limits, draft_budget, fitted, plan_round, prepared_plan
from executor.request import NO_GUESSES, Guesses, Verdict
from executor.verifying import TargetGone, Verifying

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from executor.config import Timeouts
    from executor.controller import Controller
    from executor.lanes import Lanes
    from executor.plan import Step
    from executor.request import Delta, Request
    from executor.setting import Setting
    from executor.stats import Stats
    from executor.trace import Trace
    from ipc.messages import VerifiedItem, Vocabulary

_IDLE_SECONDS = 60.0
_PARTS_AT_MOST = 4
"""What is verified by itself is no smaller than such a part of all sequences."""


class Rounds:
    """`vocabulary`, `max_model_len` and `verify_tokens` are the target's, known once it serves."""

    def __init__(
        self,
        lanes: Lanes,
        timeouts: Timeouts,
        stats: Stats,
        controller: Controller,
        strikes: int,
        say: Callable[[Request, Delta], None],
        finish: Callable[[Request], None],
        fail: Callable[[Request, RequestFailed], None],
        trace: Trace | None = None,
    ) -> None:
        """`strikes`: a request over which the target died so many times in a row fails. `say`: what was added
        to a request. `finish`, `fail`: what becomes of one that has ended."""
        self._lanes = lanes
        self._stats = stats
        self._controller = controller
        self._strikes = strikes
        self._say = say
        self._finish = finish
        self._fail = fail
        self.accounting = Accounting(lanes, stats, controller, trace)
        self._drafting = Drafting(lanes, timeouts, stats, trace)
        self._verifying = Verifying(lanes)
        self._began: float | None = None
        self._idle_since = 0.0
        self._wait = Wait(0.0, 0.0)
        self._setting = controller.current
        self._running = 0
        self._read = False
        self._answered = True
        self._ended: Ended | None = None
        self.vocabulary: Vocabulary
        self.max_model_len = 0
        self.verify_tokens = 0

    @property
    def waits_for_drafts(self) -> bool:
        """Whether the speculator is at something that somebody may want."""
        return self._drafting.wanted

    def collect(self) -> None:
        """Take what the lanes have answered."""
        self._settle()
        self._drafting.collect(self.vocabulary.size)

    def turn(self, running: Sequence[Request], seated: Collection[int] | None, *, hold: bool) -> float:
        """Give the lanes that are idle their next orders; returns until when to wait for answers, monotonic.

        `seated`: sequences that the speculator has room for; None is all. `hold`: verify nothing, since one
        that is to make room for others is still at it.
        """
        until = self._lanes.now() + _IDLE_SECONDS
        if not self._lanes.target.serving:
            for request in running:
                dialogue.drop_placed_draft(self._lanes, request)
        if not running or not self._lanes.target.serving:
            self._began = None
            return until
        if self._began is None:
            self._began = self._idle_since = self._lanes.now()
        if self._lanes.target.idle or self._drafting.free:
            setting = self._controller.setting(len(running), self._lanes.now())
            self._running = len(running)
            plan = plan_round(running, self._limits(setting.k), seated)
            self._drafting.drop_others(plan)
            if self._lanes.target.idle and not hold and setting.hypotheses and self._drafting.free:
                self._go_ahead(plan, setting)
            self._draft(plan, setting)
            if self._lanes.target.idle and not hold:
                until = min(until, self._verify(plan, setting))
                self._draft(plan, setting)
        return until

    def account(self) -> None:
        """For the round that has ended, if one has: now that the lanes have their orders there is time."""
        if self._ended is not None:
            ended, self._ended = self._ended, None
            self.accounting.note(ended)

    @property
    def alarm(self) -> str:
        """Why the speculator is no good; empty if it is."""
        collapse = self.accounting.collapse
        return collapse.alarm if collapse is not None else ""

    def _limits(self, k: int) -> Limits:
        speculator = self._lanes.speculator
        ready = speculator.ready if speculator is not None and speculator.serving else None
        return Limits(k, self.max_model_len, ready.max_model_len if ready is not None else 0)

    # ------------------------------------------------------------ draft

    def _draft(self, plan: Sequence[Step], setting: Setting) -> None:
        if not self._drafting.free:
            return
        waiting = [step for step in plan if _needs_draft(step)]
        verified: list[Step] = []
        if setting.hypotheses:
            held = {step.request.seq for step in plan if step.drafted}  # its seat may be another's meanwhile
            verified = [step for step in self._verifying.plan if step.request.seq in held]
            verified = prepared_plan(verified, self._limits(setting.k))
        if waiting:
            if setting.ubatches > 1:  # never more than half, so that the parts stay alike
                waiting = waiting[: -(-len(plan) // 2)]
            budget = draft_budget(plan, self.verify_tokens)
            self._drafting.ask(waiting, setting.hypotheses, budget, verified)
        elif verified:
            self._drafting.prepare(verified, setting.hypotheses)

    # ------------------------------------------------------------ verify

    def _go_ahead(self, plan: Sequence[Step], setting: Setting) -> None:
        """Verify those whose verdicts were guessed, if the others' drafts are not worth waiting for."""
        ready = [step for step in plan if not _needs_draft(step)]
        if 0 < len(ready) < len(plan) and not self._waits(ready, len(plan) - len(ready), setting):
            self._order(ready, setting)

    def _verify(self, plan: Sequence[Step], setting: Setting) -> float:
        """Returns until when to wait if nothing is to be verified yet."""
        until = self._drafting.waited_until
        waits = until > self._lanes.now()
        ready = [step for step in plan if not (waits and step.k > 0 and step.request.draft is None)]
        missing = len(plan) - len(ready)
        if not ready or (missing and self._waits(ready, missing, setting)):
            return until
        self._order(ready, setting)
        return self._lanes.now() + _IDLE_SECONDS

    def _order(self, ready: Sequence[Step], setting: Setting) -> None:
        self._fit(ready)
        self._stats.missed += sum(_missed(step) for step in ready)
        self._answered = all(step.request.draft is not None for step in ready)
        self._verifying.ask(ready)
        self._setting = setting
        self._wait = self._drafting.wait_since(self._idle_since)

    def _waits(self, ready: Sequence[Step], missing: int, setting: Setting) -> bool:
        """Whether those that are ready are to wait for the drafts of others."""
        if setting.ubatches > 1:  # a splinter would be a third part, for which both lanes have to wait
            return _PARTS_AT_MOST * len(ready) < len(ready) + missing
        drafted = sum(step.request.draft is not None for step in ready)
        return setting.hypotheses == 0 or self._controller.worth_waiting(drafted, missing)

    def _fit(self, plan: Sequence[Step]) -> None:
        """Cut drafts for which one verification has no room."""
        drafts = [step.request.draft or NO_GUESSES for step in plan]
        lengths = fitted([len(draft.tokens) for draft in drafts], draft_budget(plan, self.verify_tokens))
        for step, (tokens, q, *_), length in zip(plan, drafts, lengths, strict=True):
            if length < len(tokens):
                step.request.draft = Guesses(tokens[:length], q[:length])
                dialogue.refuse(self._lanes, q[length:])
                self._stats.spared += len(tokens) - length

    # ------------------------------------------------------------ commit, publish

    def _settle(self) -> None:
        """Commit what the target has said, if it has."""
        plan, reads, asked = self._verifying.plan, self._verifying.reads, self._lanes.target.asked_at
        try:
            verdicts = self._verifying.collect(self.vocabulary.size)
        except TargetGone as gone:
            self._began = None
            self._give_up(gone.plan)
            return
        if verdicts is None:
            return
        now = self._lanes.now()
        drafted_at = [step.request.drafted_at for step in plan]
        outcomes = []
        price = 0.0
        if any(step.request.prepared for step in plan):
            price = self._controller.price_of_waiting(self._setting.k, self._running)
        for request, *_ in plan:
            if not request.pending:
                draft, verdict = request.draft or NO_GUESSES, verdicts.items[request.seq]
                self._commit(request, draft.tokens, verdict, price)
                outcomes.append(Outcome(len(draft.tokens), verdict.n_accepted))
        self.accounting.watch_acceptance(outcomes)
        hurry = not self._controller.worth_finishing(len(plan))
        self._drafting.verdict_given([step.request for step in plan], hurry=hurry)
        self._ended = Ended(
            plan,
            drafted_at,
            outcomes,
            setting=self._setting,
            running=self._running,
            answered=self._answered,
            reads=reads,
            read=self._read,
            began=now if self._began is None else self._began,
            ended=now,
            committed=self._lanes.now(),
            asked=asked,
            wait=self._wait,
            made=self._drafting.take_made(),
            busy=verdicts.busy_ns / 1e9,
            wire=verdicts.wire_ns / 1e9,
        )
        self._began = self._idle_since = now
        self._read = reads

    def _commit(self, request: Request, draft: list[int], verdict: VerifiedItem, price: float) -> None:
        """`price`: see Drafting.good_enough."""
        base_len = len(request.tokens)
        request.strikes = 0
        self._say(request, commit(request, draft, verdict, self.max_model_len))
        self._stats.acceptance.record(len(draft), verdict.n_accepted)
        request.verdict = Verdict(base_len, verdict.n_accepted, verdict.next_token)
        request.draft = None
        if request.prepared:
            prepared = request.prepared.get(request.verdict)
            if prepared is not None and self._drafting.good_enough(prepared, price):
                request.draft = prepared
            self._drafting.count(hit=request.draft is not None)
            dialogue.refuse_all(self._lanes, request.prepared.values(), but=request.draft)
            request.prepared = {}
        if request.finish_reason is not None:
            self._finish(request)

    def _give_up(self, plan: Sequence[Step]) -> None:
        """A request over which the target dies again and again fails alone."""
        for request, *_ in plan:
            if request.strikes >= self._strikes:
                reason = self._verifying.died_of  # the present target may be its successor already
                failed = RequestFailed(f"the target died {request.strikes} times in a row over it: {reason}")
                self._fail(request, failed)


def _needs_draft(step: Step) -> bool:
    its = step.request
    return step.k > 0 and its.draft is None and not its.verifying and its.asked_len != len(its.tokens)


def _missed(step: Step) -> bool:
    """Whether it goes on without the draft that it was to have."""
    its = step.request
    return its.speculate and its.draft is None and its.asked_len == len(its.tokens)
