"""The verify step of a round: the target judges, and its verdicts are checked before they are committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from executor import dialogue, prompt_scores
from executor.hidden_rows import ORDER_BYTES
from executor.request import NO_GUESSES
from ipc.messages import Verified, VerifiedItem, Verify, VerifyItem
from ipc.q_rows import MESSAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.lane import Lane
    from executor.lanes import Lanes
    from executor.plan import Step
    from executor.request import Request
    from ipc.messages import HeadSpec, HiddenRows, PendingItem


PREFILL_TOKENS = 256
"""A round runs so many tokens of prompts at most, so that a long one does not keep the others waiting."""


class TargetGone(Exception):
    """It ended, or was ended, over the sequences of this plan."""

    def __init__(self, plan: Sequence[Step]) -> None:
        super().__init__()
        self.plan = plan


class Verdicts(NamedTuple):
    """`items` by sequence; one without is still being prefilled. `busy_ns`: how long the target computed;
    `wire_ns`: how much longer it took from asking to answering."""

    items: dict[int, VerifiedItem]
    busy_ns: int
    wire_ns: int


class Verification(NamedTuple):
    """In flight to a target: the sequences, what was asked, and for which head. `reads`: whether it has to
    run some history first."""

    target: Lane
    plan: Sequence[Step]
    items: list[VerifyItem]
    head: HeadSpec | None
    reads: bool


class Verifying:
    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._asked: Verification | None = None
        self.died_of = ""
        """What the target died of, the last time that it died over sequences."""

    @property
    def plan(self) -> Sequence[Step]:
        """What is being verified."""
        return self._asked.plan if self._asked is not None else ()

    @property
    def reads(self) -> bool:
        """Whether what is being verified includes history that the target runs for the first time."""
        return self._asked is not None and self._asked.reads

    def ask(self, plan: Sequence[Step]) -> None:
        """Have their drafts judged, in so far as they have any. The target is idle."""
        target = self._lanes.target
        items = []
        reads = any(request.pending or request.seq not in target.told for request, *_ in plan)
        reader = self._lanes.speculator
        head = reader.head if reader is not None else None
        room, q_room = ORDER_BYTES, MESSAGE_BYTES  # drafts of several orders may come together here
        transport = self._lanes.transport
        arena = transport.arena_for(target, reader) if head is not None else ""
        for request, *_ in plan:
            if head is not None:
                request.rows.fit(head, transport.leases)
            if request.seq not in target.told:
                dialogue.open_at(self._lanes, target, request, len(request.tokens))
            since = dialogue.news(target, request)
            draft, q, *_ = request.draft or NO_GUESSES
            rows_since = _rows_since(request, draft, head, room) if request.speculate else None
            if head is not None and rows_since is not None:
                room -= (len(request.tokens) + len(draft) - rows_since) * head.row_bytes
            handed = dialogue.q_rows(self._lanes, target, q, q_room) if q else q
            q_room -= sum(map(dialogue.inline_bytes, handed))
            items.append(
                VerifyItem(
                    *(request.seq, request.gen, len(request.tokens), since, draft, rows_since),
                    prompt_since=prompt_scores.wanted_since(request),
                    q=handed,
                )
            )
            request.verifying = True
        self._asked = Verification(target, plan, items, head, reads)
        taps = head.taps if head is not None else ()
        number = next(dialogue.order_numbers)
        self._lanes.ask(target, Verify(target.epoch, number, items, taps, PREFILL_TOKENS, arena))

    def collect(self, vocabulary_size: int) -> Verdicts | None:
        """Verdicts for every sequence of the plan whose history the target has run; None as long as there are
        none.

        Raises TargetGone if there never will be any. If it died over them, that is a strike for each; nothing
        is committed, and they go on where they were.
        """
        if self._asked is None:
            return None
        target, plan, items, head, _ = self._asked
        if target.serving and target.in_flight is not None:
            return None
        self._asked = None
        for request, *_ in plan:
            request.verifying = False
        reply = self._lanes.take(target)
        if not isinstance(reply, Verified):
            if target.serving:
                self._lanes.supervisor.take_down(target, "answered what it was not asked")
            self._strike(plan, target)
            raise TargetGone(plan)
        reason = self._contradiction(items, reply, vocabulary_size, head) or _wrong_scores(plan, reply)
        if reason:
            self._lanes.supervisor.take_down(target, reason)
            self._strike(plan, target)
            raise TargetGone(plan)
        verdicts = {item.seq: item for item in reply.items}
        pending = {item.seq: item for item in reply.pending}
        for request, *_ in plan:
            waits = pending.get(request.seq)
            request.pending = waits is not None
            if waits is not None:
                target.held[request.seq] = waits.held
            told = waits or verdicts[request.seq]
            if request.params.prompt_logprobs is not None:
                request.prompt_logprobs += told.prompt_logprobs
            if head is not None:
                request.rows.add(told.rows, head, self._lanes.transport.leases)
        took = round((target.answered_at - target.asked_at) * 1e9)
        return Verdicts(verdicts, reply.busy_ns, max(0, took - reply.busy_ns))

    def _contradiction(
        self, asked: Sequence[VerifyItem], reply: Verified, vocabulary_size: int, head: HeadSpec | None
    ) -> str:
        """What in a reply cannot be; empty if all can."""
        verdicts = {item.seq: item for item in reply.items}
        pending = {item.seq: item for item in reply.pending}
        progress = bool(verdicts)
        for item in asked:
            if waits := pending.get(item.seq):
                progress |= waits.held > self._lanes.target.held.get(item.seq, 0)
                if not _possible_wait(item, waits, head):
                    return f"impossible delay {waits} of {item}"
            elif not _possible(item, verdicts.get(item.seq), vocabulary_size, head):
                return f"impossible verdict {verdicts.get(item.seq)} on {item}"
        if (answers := len(reply.items) + len(reply.pending)) != len(asked):
            return f"{answers} verdicts on {len(asked)} drafts"
        return "" if progress else "neither a verdict nor progress towards one"

    def _strike(self, plan: Sequence[Step], target: Lane) -> None:
        self.died_of = target.down_because
        for request, *_ in plan:
            request.strikes += 1


def _wrong_scores(plan: Sequence[Step], reply: Verified) -> str:
    """Whose prompt has not the log-probabilities that were asked for; empty if nobody's."""
    asked = {request.seq: request for request, *_ in plan if request.params.prompt_logprobs is not None}
    if not asked:
        return ""
    told: list[tuple[VerifiedItem | PendingItem, int]] = [(item, item.base_len) for item in reply.items]
    for item, held in [*told, *((item, item.held) for item in reply.pending)]:
        request = asked.get(item.seq)
        if request is not None and not prompt_scores.as_wanted(request, item, held):
            return f"{len(item.prompt_logprobs)} log-probabilities of {held} tokens of sequence {item.seq}"
    return ""


def _rows_since(request: Request, draft: Sequence[int], head: HeadSpec | None, room: int) -> int | None:
    """The first position whose hidden row is news and of use, if all from there on fit into `room` bytes."""
    if head is None:
        return None
    since = max(request.rows.end, len(request.tokens) - head.window)
    return since if (len(request.tokens) + len(draft) - since) * head.row_bytes <= room else None


def _sound(asked: VerifyItem, rows: Sequence[HiddenRows], end: int, head: HeadSpec | None) -> bool:
    """Whether the hidden rows are of positions that were asked for and below `end`, in order, and whole."""
    position = asked.rows_since if asked.rows_since is not None else end
    for part in rows:
        if head is None or part.start < position or not _whole(part, head):
            return False
        position = part.start + part.count
    return not rows or position <= end


def _whole(part: HiddenRows, head: HeadSpec) -> bool:
    """Whether there are as many rows as it says, here or in an arena."""
    if part.at is None:
        return part.count * head.row_bytes == len(part.data)
    shape = (part.count, head.row_bytes // 2)
    return part.count > 0 and not part.data and (part.at.dtype, part.at.shape) == ("bf16", shape)


def _possible_wait(asked: VerifyItem, pending: PendingItem, head: HeadSpec | None) -> bool:
    held = pending.held
    return pending.gen == asked.gen and 0 <= held < asked.base_len and _sound(asked, pending.rows, held, head)


def _possible(
    asked: VerifyItem, verdict: VerifiedItem | None, vocabulary_size: int, head: HeadSpec | None
) -> bool:
    return (
        verdict is not None
        and (verdict.gen, verdict.base_len) == (asked.gen, asked.base_len)
        and 0 <= verdict.n_accepted <= len(asked.draft)
        and 0 <= verdict.next_token < vocabulary_size
        and len(verdict.logprobs) in (0, verdict.n_accepted + 1)
        and _sound(asked, verdict.rows, verdict.base_len + verdict.n_accepted, head)
    )
