"""The draft step of a round: what the speculator is asked, and which of its answers are used.

A sequence without a usable draft takes a plain step. That is all that a speculator can do to a round, whether
it is late, dead, starting again, catching up or wrong.
"""

from __future__ import annotations

import time
from collections import defaultdict
from logging import WARNING
from typing import TYPE_CHECKING, NamedTuple

from executor import dialogue
from executor.events import record
from executor.hidden_rows import ORDER_BYTES
from executor.pace import DraftPace, work
from ipc import q_rows
from ipc.link import LinkState
from ipc.messages import Draft, Drafted, DraftItem, LaneSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.config import Timeouts
    from executor.lane import Lane
    from executor.lanes import Lanes
    from executor.plan import Step
    from executor.request import Request
    from executor.stats import Stats
    from ipc.messages import DraftedItem, QRow

CATCH_UP_TOKENS = 512
"""A speculator that knows less is first told this many at a time, while the target goes on without it."""
DRAFT_STRIKES = 3
"""A sequence during which the speculator died so often in a row is continued without drafts."""


class Guesses(NamedTuple):
    """A usable draft: its tokens, and what they were drawn from, if they were."""

    tokens: list[int]
    q: list[QRow]


NO_GUESSES = Guesses([], [])


class Owing(NamedTuple):
    """An order that is not waited for any more: to whom, about what, and how much work it is to draft."""

    speculator: Lane
    requests: list[Request]
    work: float


class Drafting:
    def __init__(self, lanes: Lanes, timeouts: Timeouts, stats: Stats) -> None:
        self._lanes = lanes
        self._stats = stats
        self._owing: Owing | None = None
        # By what runs, not by incarnation: a lane that starts again is as fast as it was.
        self._paces = defaultdict[LaneSpec, DraftPace](
            lambda: DraftPace(least=timeouts.draft_least, most=timeouts.draft)
        )

    def run(
        self, plan: Sequence[Step], vocabulary_size: int, budget: int | None = None
    ) -> tuple[dict[int, Guesses], int]:
        """Usable drafts by sequence, and the nanoseconds that the speculator computed for them.

        `budget`: guesses that there is room for; what the speculator finds worth less is left out.
        """
        self._look_after_owing()
        speculator = self._lanes.speculator
        if speculator is None or not speculator.idle:
            return {}, 0
        for request in [step.request for step in plan if not step.drafted]:
            dialogue.drop(self._lanes, speculator, request)
        steps = self._without_foreign(speculator, [step for step in plan if step.k > 0])
        asked = {step.request.seq: step for step in _suspects_alone(steps)}
        if not asked:
            return {}, 0
        if self._catch_up(speculator, [step.request for step in asked.values()]):
            return {}, 0
        amount = work(
            k=max(step.k for step in asked.values()),
            news=sum(dialogue.backlog(speculator, step.request) for step in asked.values()),
        )
        items = []
        room = ORDER_BYTES
        for request, k, _ in asked.values():
            if request.seq not in speculator.told:
                dialogue.open_at(self._lanes, speculator, request, len(request.tokens))
            since = dialogue.news(speculator, request)
            rows = dialogue.rows(self._lanes, speculator, request, room)
            room -= sum(len(part.data) for part in rows)
            items.append(DraftItem(request.seq, request.gen, len(request.tokens), since, k, rows))
        # Only large rows of q have a place of their own.
        large = speculator.spec.q_arena > 0
        arena = self._lanes.transport.arena_for(speculator, self._lanes.target) if large else ""
        number = next(dialogue.order_numbers)
        self._lanes.ask(speculator, Draft(speculator.epoch, number, items, budget, arena=arena))
        pace = self._paces[speculator.spec]
        reply = self._lanes.reply(speculator, time.monotonic() + pace.patience(amount))
        if isinstance(reply, Drafted):
            pace.note(amount, speculator.answered_at - speculator.asked_at)
            coupled = speculator.spec.acceptance == "coupled"
            return self._usable(asked, reply.items, vocabulary_size, coupled=coupled), reply.busy_ns
        self._stats.missed += len(asked)
        self._owing = Owing(speculator, [step.request for step in asked.values()], amount)
        return {}, 0

    def _look_after_owing(self) -> None:
        """A strike for the sequences over which the speculator died, perhaps when nobody waited any more; and
        how long it took if it did not."""
        if self._owing is None:
            return
        speculator, requests, amount = self._owing
        owes = speculator.in_flight is not None and speculator.link.state is not LinkState.STOPPING
        if owes and speculator.serving:
            return
        self._owing = None
        if owes:
            self._strike([request for request in requests if request.finish_reason is None])
        elif amount and speculator.in_flight is None:
            self._paces[speculator.spec].note(amount, speculator.answered_at - speculator.asked_at)

    def _without_foreign(self, speculator: Lane, steps: list[Step]) -> list[Step]:
        """A padded vocabulary of the target can bring tokens that the speculator has not got."""
        for request in [step.request for step in steps if _foreign(speculator, step.request)]:
            self._quarantine(request, "it holds a token that the speculator does not have")
        return [step for step in steps if step.request.speculate]

    def _catch_up(self, speculator: Lane, requests: Sequence[Request]) -> bool:
        """Whether the speculator was behind and has now been told more. Nobody waits for it to read that."""
        room = CATCH_UP_TOKENS
        if sum(dialogue.backlog(speculator, request) for request in requests) <= room:
            return False
        items, told = [], []
        for request in requests:
            take = min(dialogue.backlog(speculator, request), room)
            if take == 0:
                continue
            length = speculator.told.get(request.seq, 0) + take
            if request.seq not in speculator.told:
                dialogue.open_at(self._lanes, speculator, request, length)
            items.append(
                DraftItem(request.seq, request.gen, length, dialogue.news(speculator, request, length), k=0)
            )
            told.append(request)
            room -= take
        self._lanes.ask(speculator, Draft(speculator.epoch, next(dialogue.order_numbers), items))
        speculator.abandoned = True
        self._owing = Owing(speculator, told, work=0)
        self._stats.catch_ups += 1
        return True

    def _usable(
        self, asked: dict[int, Step], items: Sequence[DraftedItem], vocabulary_size: int, *, coupled: bool
    ) -> dict[int, Guesses]:
        """Only what was asked for, of this generation and length, of tokens that the target knows."""
        drafts: dict[int, Guesses] = {}
        open_asks = dict(asked)  # a second answer about the same sequence is stale
        for item in items:
            step = open_asks.pop(item.seq, None)
            if step is None or (item.gen, item.base_len) != (step.request.gen, len(step.request.tokens)):
                self._lanes.counts.stale += 1
                continue
            step.request.draft_strikes = 0
            if item.broken:
                self._stats.broken += 1
                self._quarantine(step.request, "what the speculator computes for it are no numbers")
            elif not _possible(item, step.k, vocabulary_size):
                self._stats.invalid += 1
                self._quarantine(step.request, f"its draft {item.tokens[:8]} cannot be")
            elif reason := _q_fault(item, coupled, vocabulary_size):
                self._stats.invalid += 1
                self._quarantine(step.request, f"what its draft was drawn from cannot be: {reason}")
            else:
                drafts[item.seq] = Guesses(item.tokens[: item.worth], item.q[: item.worth])
                self._refuse(item.q[len(drafts[item.seq].tokens) :])
                self._stats.spared += len(item.tokens) - len(drafts[item.seq].tokens)
        return drafts

    def _refuse(self, rows: Sequence[QRow]) -> None:
        """Rows that nobody will read."""
        for row in rows:
            if row.at is not None:
                self._lanes.transport.leases.refuse(row.at.ref)

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


def _possible(item: DraftedItem, k: int, vocabulary_size: int) -> bool:
    worth = len(item.tokens) if item.worth is None else item.worth
    return 0 <= worth <= len(item.tokens) <= k and _known(item.tokens, vocabulary_size)


def _q_fault(item: DraftedItem, coupled: bool, vocabulary_size: int) -> str:
    """Why the tokens of a draft, which are known ones, cannot have been drawn from its q rows; empty if they
    can. A wrong one that looks right would show in how often tokens come, so what can be checked is."""
    if not item.q:
        return ""
    if coupled or len(item.q) != len(item.tokens):
        return f"{len(item.q)} q rows where {0 if coupled else len(item.tokens)} are due"
    faults = (
        q_rows.fault(row, token, vocabulary_size) for row, token in zip(item.q, item.tokens, strict=True)
    )
    return next(filter(None, faults), "")


def _known(tokens: Sequence[int], vocabulary_size: int) -> bool:
    return not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary_size)
