"""The drafts: what the speculator is asked, and which of its answers are used.

It has one order at a time: to draft for sequences that have no draft, or, for those that are being verified,
to prepare drafts for verdicts that may come. A sequence without a usable draft takes a plain step. That is
all that a speculator can do to a round, whether it is late, dead, starting again, catching up or wrong.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from logging import WARNING
from typing import TYPE_CHECKING, NamedTuple

from executor import dialogue, draft_fault
from executor.costs import Mean
from executor.events import record
from executor.hidden_rows import ORDER_BYTES
from executor.pace import DraftPace, work
from executor.request import Guesses, Verdict
from ipc.link import LinkState
from ipc.messages import Cancel, Draft, Drafted, DraftItem, LaneSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.config import Timeouts
    from executor.lane import Lane
    from executor.lanes import Lanes
    from executor.plan import Step
    from executor.request import Request
    from executor.stats import Stats
    from executor.trace import Trace
    from ipc.messages import DraftedItem, Prepared

CATCH_UP_TOKENS = 512
"""A speculator that knows less, beyond what a verdict brings to each sequence, is first told this many at a
time, while the target goes on without it."""
PREPARE_NEWS = 64
"""No drafts are prepared where a speculator knows less by so many tokens: each branch would read them."""
DRAFT_STRIKES = 3
"""A sequence during which the speculator died so often in a row is continued without drafts."""


class Asked(NamedTuple):
    """What was asked about a sequence, of this generation and length: see DraftItem."""

    request: Request
    gen: int
    base_len: int
    k: int
    ahead: list[int]
    hypotheses: int

    @property
    def current(self) -> bool:
        """Whether the sequence is where it was."""
        return (self.request.gen, len(self.request.tokens)) == (self.gen, self.base_len)


class Wait(NamedTuple):
    """For drafts, in seconds: while the speculator computed, and while its answers were on their way."""

    computed: float
    way: float


class Made(NamedTuple):
    """Of a draft: steps asked for, seconds that were computed, and those that it took besides."""

    steps: int
    computed: float
    way: float


class Order:
    """In flight to a speculator. `waited_until`: so long it is worth to wait for the answer, monotonic; None
    as long as nobody needs it."""

    def __init__(self, speculator: Lane, number: int, asked: list[Asked], amount: float) -> None:
        """`amount`: how much work it is to draft; 0 if that is not known."""
        self.speculator = speculator
        self.number = number
        self.asked = {each.request.seq: each for each in asked}
        self.amount = amount
        self.waited_until: float | None = None
        self.cancelled = False


class Drafting:
    def __init__(self, lanes: Lanes, timeouts: Timeouts, stats: Stats, trace: Trace | None = None) -> None:
        self._lanes = lanes
        self._trace = trace
        self._stats = stats
        self._order: Order | None = None
        self._made: Made | None = None
        self._fresh = defaultdict[int, Mean](partial(Mean, None))
        """By K, how many guesses should stand of a draft that was not prepared, where that is known."""
        self._answers: list[tuple[float, float, float]] = []
        """Of answers that somebody may have waited for: when asked and answered, and seconds computed."""
        # By what runs, not by incarnation: a lane that starts again is as fast as it was.
        self._paces = defaultdict[LaneSpec, DraftPace](
            lambda: DraftPace(least=timeouts.draft_least, most=timeouts.draft)
        )

    @property
    def free(self) -> bool:
        """Whether the speculator takes an order now."""
        speculator = self._lanes.speculator
        return self._order is None and speculator is not None and speculator.idle

    @property
    def wanted(self) -> bool:
        """Whether the answer to what the speculator is at may still be of use."""
        order = self._order
        if order is None or not order.speculator.serving:
            return False
        return order.waited_until is None or order.waited_until > self._lanes.now()

    @property
    def waited_until(self) -> float:
        """How long to wait for what the speculator is at, monotonic; 0 if there is nothing to wait for."""
        order = self._order
        if order is None or not order.speculator.serving:
            return 0.0
        return order.waited_until or 0.0

    def wait_since(self, then: float) -> Wait:
        """How much of the time since then, monotonic, went by in waiting for drafts, if in vain; told
        once."""
        answers, self._answers = self._answers, []
        if self._order is not None and self._order.waited_until:  # and it is not waited for any longer
            now = min(self._lanes.now(), self._order.waited_until)
            answers.append((self._order.speculator.asked_at, now, 0.0))
        seconds = computed = 0.0
        for asked, answered, busy in answers:
            waited = max(0.0, answered - max(asked, then))
            seconds += waited
            computed += min(waited, busy)
        return Wait(computed, seconds - computed)

    def take_made(self) -> Made | None:
        """The last draft that was waited for, told once."""
        made, self._made = self._made, None
        return made

    def drop_others(self, plan: Sequence[Step]) -> None:
        """Of sequences that it need not hold the speculator forgets what it was told."""
        speculator = self._lanes.speculator
        if speculator is not None and speculator.serving:
            for step in plan:
                if not step.drafted:
                    dialogue.drop(self._lanes, speculator, step.request)

    def ask(
        self, plan: Sequence[Step], hypotheses: int, budget: int | None, verified: Sequence[Step] = ()
    ) -> None:
        """Have drafts made for sequences that wait for theirs, and in the same batch what `prepare` would for
        those that are being `verified`. The speculator is free.

        `hypotheses`: so many verdicts on each draft it is asked to guess, now or later. `budget`: guesses
        that there is room for; what the speculator finds worth less is left out.
        """
        speculator = self._lanes.speculator
        assert speculator is not None, "there is one that is free"
        steps = _suspects_alone(self._without_foreign(speculator, [step for step in plan if step.k > 0]))
        if not steps or self._catch_up(speculator, [step.request for step in steps]):
            return
        news = sum(dialogue.backlog(speculator, step.request) for step in steps)
        asked = [Asked(its, its.gen, len(its.tokens), k, [], hypotheses) for its, k, *_ in steps]
        for step in steps:
            step.request.asked_len = len(step.request.tokens)
        if not (speculator.spec.q_arena or any(step.request.draft_strikes for step in steps)):
            asked += self._asked_ahead(speculator, verified, hypotheses)
        amount = work(max(map(_steps, asked)), news)
        order = self._send(speculator, asked, amount, budget)
        order.waited_until = speculator.asked_at + self._paces[speculator.spec].patience(amount)

    def prepare(self, plan: Sequence[Step], hypotheses: int) -> None:
        """Have drafts made for verdicts that may come on the drafts of these sequences, which the target has.

        A step's `k` is that of the drafts to make. The speculator is free.
        """
        speculator = self._lanes.speculator
        assert speculator is not None, "there is one that is free"
        if asked := self._asked_ahead(speculator, plan, hypotheses):
            self._send(speculator, asked, amount=0)

    def _asked_ahead(self, speculator: Lane, plan: Sequence[Step], hypotheses: int) -> list[Asked]:
        asked = [
            Asked(its, its.gen, len(its.tokens), k, its.draft.tokens, hypotheses)
            for its, k, *_ in plan
            if k > 0 and its.draft is not None and its.draft.tokens
            if its.prepared_len != len(its.tokens) and _up_to_date(speculator, its)
        ]
        for each in asked:
            each.request.prepared_len = each.base_len
        return asked

    def good_enough(self, prepared: Guesses, price: float) -> bool:
        """Whether a draft that was prepared is to be used, rather than another waited for, which costs as
        much as `price` tokens."""
        fresh = self._fresh[prepared.k]
        if prepared.expected is None or fresh.empty or not self.free:
            return True
        return fresh.value - prepared.expected <= price

    def verdict_given(self, requests: Sequence[Request], *, hurry: bool) -> None:
        """What is being prepared for them is needed now; in a `hurry` as far as it has got."""
        order = self._order
        if order is None or not order.speculator.serving:
            return
        asked = [its for its in requests if its.seq in order.asked and order.asked[its.seq].ahead]
        needed = any(its.finish_reason is None for its in asked)
        others = order.waited_until is not None  # wait for it, too
        if asked and not order.cancelled and (hurry or not (needed or others)):
            self._lanes.tell(order.speculator, Cancel(order.speculator.epoch, order.number))
            order.cancelled = True
        if needed and not others:
            patience = self._paces[order.speculator.spec].patience(
                work(max(map(_steps, order.asked.values())), 0)
            )
            order.waited_until = self._lanes.now() + patience

    def collect(self, vocabulary_size: int) -> None:
        """Take what the speculator has answered, or note that it never will: a strike for the sequences over
        which it died, perhaps when nobody waited any more."""
        order = self._order
        if order is None:
            return
        speculator = order.speculator
        owes = speculator.in_flight is not None and speculator.link.state is not LinkState.STOPPING
        if owes and speculator.serving:
            return
        self._order = None
        for asked in order.asked.values():
            asked.request.drafting = False
        reply = self._lanes.take(speculator)
        if isinstance(reply, Drafted):
            if self._trace is not None:
                self._draw(self._trace, order, reply)
            computed, took = reply.busy_ns / 1e9, speculator.answered_at - speculator.asked_at
            if order.waited_until:
                self._answers.append((speculator.asked_at, speculator.answered_at, computed))
            if order.amount and not order.cancelled:
                self._paces[speculator.spec].note(order.amount, took)
            if order.amount and not any(asked.ahead for asked in order.asked.values()):
                # By how much was asked for: where drafts end early, that much costs less.
                asked_for = max(map(_steps, order.asked.values()))
                self._made = Made(asked_for, computed, max(0.0, took - computed))
            coupled = speculator.spec.acceptance == "coupled"
            self._use(order, reply.items, vocabulary_size, coupled=coupled)
        elif owes:
            if order.waited_until:
                self._answers.append((speculator.asked_at, self._lanes.now(), 0.0))
            requests = [asked.request for asked in order.asked.values()]
            self._strike([request for request in requests if request.finish_reason is None])

    def _draw(self, trace: Trace, order: Order, reply: Drafted) -> None:
        lane, asked = order.speculator, list(order.asked.values())
        kind = "prepare" if any(each.ahead for each in asked) else "draft"
        name = kind if any(each.k for each in asked) else "catch up"
        what = {"sequences": len(asked), "k": max((each.k for each in asked), default=0)}
        trace.work("speculator", name, lane.asked_at, lane.answered_at, reply.busy_ns / 1e9, **what)
        for each in asked:
            each.request.drafted_at = lane.answered_at

    def _send(
        self,
        speculator: Lane,
        asked: list[Asked],
        amount: float,
        budget: int | None = None,
    ) -> Order:
        items = []
        room = ORDER_BYTES
        for each in asked:
            request = each.request
            if request.seq not in speculator.told:
                dialogue.open_at(self._lanes, speculator, request, len(request.tokens))
            since = dialogue.news(speculator, request)
            rows = dialogue.rows(self._lanes, speculator, request, room)
            room -= sum(len(part.data) for part in rows)
            _, gen, base_len, k, ahead, hypotheses = each
            items.append(DraftItem(request.seq, gen, base_len, since, k, rows, ahead, hypotheses))
            request.drafting = True
        # Only large rows of q have a place of their own, and only if it is likely that they are read.
        large = speculator.spec.q_arena > 0 and not any(each.ahead for each in asked)
        arena = self._lanes.transport.arena_for(speculator, self._lanes.target) if large else ""
        number = next(dialogue.order_numbers)
        self._order = Order(speculator, number, asked, amount)
        self._lanes.ask(speculator, Draft(speculator.epoch, number, items, budget, arena=arena))
        return self._order

    def _without_foreign(self, speculator: Lane, steps: list[Step]) -> list[Step]:
        """A padded vocabulary of the target can bring tokens that the speculator has not got."""
        for request in [step.request for step in steps if _foreign(speculator, step.request)]:
            self._quarantine(request, "it holds a token that the speculator does not have")
        return [step for step in steps if step.request.speculate]

    def _catch_up(self, speculator: Lane, requests: Sequence[Request]) -> bool:
        """Whether the speculator was behind and has now been told more. Nobody waits for it to read that."""
        room, usual = CATCH_UP_TOKENS, speculator.spec.num_speculative_tokens + 1
        if sum(max(0, dialogue.backlog(speculator, request) - usual) for request in requests) <= room:
            return False
        items, told = [], []
        for request in requests:
            backlog = dialogue.backlog(speculator, request)
            excess = min(max(0, backlog - usual), room)
            take = min(backlog, usual + excess)
            if take == 0:
                continue
            room -= excess
            length = speculator.told.get(request.seq, 0) + take
            if request.seq not in speculator.told:
                dialogue.open_at(self._lanes, speculator, request, length)
            items.append(
                DraftItem(request.seq, request.gen, length, dialogue.news(speculator, request, length), k=0)
            )
            told.append(Asked(request, request.gen, length, 0, [], 0))
        number = next(dialogue.order_numbers)
        self._order = Order(speculator, number, told, amount=0)
        self._order.waited_until = 0.0
        self._lanes.ask(speculator, Draft(speculator.epoch, number, items))
        self._stats.catch_ups += 1
        return True

    def _use(
        self, order: Order, items: Sequence[DraftedItem], vocabulary_size: int, *, coupled: bool
    ) -> None:
        """Only what was asked for, of this generation and length, of tokens that the target knows."""
        open_asks = dict(order.asked)  # a second answer about the same sequence is stale
        for item in items:
            asked = open_asks.pop(item.seq, None)
            if asked is None or (item.gen, item.base_len) != (asked.gen, asked.base_len):
                self._lanes.counts.stale += 1
                continue
            request = asked.request
            request.draft_strikes = 0
            if item.broken:
                self._stats.broken += 1
                self._quarantine(request, "what the speculator computes for it are no numbers")
            elif reason := draft_fault.of_answer(asked, item, vocabulary_size, coupled=coupled):
                self._stats.invalid += 1
                self._quarantine(request, reason)
            elif asked.ahead:
                self._prepared(asked, item.prepared)
            elif asked.k == 0:
                pass  # it only caught up
            elif asked.current and not request.verifying and request.finish_reason is None:
                request.draft = Guesses(item.tokens[: item.worth], item.q[: item.worth])
                if item.expected is not None and item.worth is None:
                    self._fresh[asked.k].note(item.expected)
                dialogue.refuse(self._lanes, item.q[len(request.draft.tokens) :])
                self._stats.spared += len(item.tokens) - len(request.draft.tokens)
            else:
                dialogue.refuse(self._lanes, item.q)
                self._lanes.counts.stale += 1

    def _prepared(self, asked: Asked, prepared: Sequence[Prepared]) -> None:
        """Keep what was prepared for the verdict, or use it if the verdict has come meanwhile."""
        request = asked.request
        drafts = {}
        for each in prepared:
            verdict = Verdict(asked.base_len, each.n_accepted, each.next_token)
            drafts[verdict] = Guesses(each.tokens, each.q, each.expected, asked.k)
        if asked.current:
            request.prepared = drafts
        elif request.gen == asked.gen and request.verdict is not None and not request.verifying:
            request.draft = request.draft or drafts.get(request.verdict)
            self.count(hit=request.draft is not None)
            dialogue.refuse_all(self._lanes, drafts.values(), but=request.draft)
        else:
            dialogue.refuse_all(self._lanes, drafts.values())

    def count(self, *, hit: bool) -> None:
        """A verdict was among those that were guessed, or not."""
        self._stats.hits += hit
        self._stats.misses += not hit

    def _strike(self, requests: Sequence[Request]) -> None:
        for request in requests:
            request.draft_strikes += 1
            if request.draft_strikes >= DRAFT_STRIKES:
                self._quarantine(
                    request, f"the speculator died {request.draft_strikes} times in a row over it"
                )

    def _quarantine(self, request: Request, reason: str) -> None:
        if request.speculate:
            request.speculate = False
            self._stats.quarantined += 1
            record(WARNING, "sequence_quarantined", seq=request.seq, reason=reason)


def _suspects_alone(steps: list[Step]) -> list[Step]:
    """After the speculator died over some sequences, each is drafted for alone until it has had a draft."""
    suspects = [step for step in steps if step.request.draft_strikes]
    return [min(suspects, key=lambda step: step.request.draft_strikes)] if suspects else steps


def _foreign(speculator: Lane, request: Request) -> bool:
    """Whether the news of a sequence hold a token outside the speculator's vocabulary."""
    assert speculator.ready is not None, "only a serving lane is asked"
    size = speculator.ready.vocabulary.size
    return size > 0 and max(request.tokens[speculator.told.get(request.seq, 0) :], default=0) >= size


def _up_to_date(speculator: Lane, request: Request) -> bool:
    """Whether the speculator can be asked about a sequence without reading much, and without a risk."""
    if request.draft_strikes or _foreign(speculator, request):
        return False
    return dialogue.backlog(speculator, request) <= PREPARE_NEWS


def _steps(asked: Asked) -> int:
    """Of the speculator: one more where verdicts are to be guessed."""
    return asked.k + bool(asked.ahead)
