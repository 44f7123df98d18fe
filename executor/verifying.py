"""The verify step of a round: the target judges, and its verdicts are checked before they are committed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from executor import dialogue, prompt_scores
from executor.drafting import NO_GUESSES
from executor.hidden_rows import ORDER_BYTES
from executor.lanes import NoReply
from ipc.messages import Verified, VerifiedItem, Verify, VerifyItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.drafting import Guesses
    from executor.lane import Lane
    from executor.lanes import Lanes
    from executor.plan import Step
    from executor.request import Request
    from ipc.messages import HeadSpec, HiddenRows, PendingItem


PREFILL_TOKENS = 256
"""A round runs so many tokens of prompts at most, so that a long one does not keep the others waiting."""


class Verdicts(NamedTuple):
    """By sequence; one without is still being prefilled. `busy_ns`: how long the target computed."""

    items: dict[int, VerifiedItem]
    busy_ns: int


class Verifying:
    def __init__(self, lanes: Lanes, seconds: float) -> None:
        """`seconds`: after so long without a verdict the target counts as hung."""
        self._lanes = lanes
        self._seconds = seconds
        self.died_of = ""
        """What the target died of, the last time that it died over sequences."""

    def run(self, plan: Sequence[Step], drafts: dict[int, Guesses], vocabulary_size: int) -> Verdicts | None:
        """A verdict for every sequence of the plan whose history the target has run.

        None if there will be none: the target is gone, or the executor is closing. If it died over them, that
        is a strike for each; nothing is committed, and they go on where they were.
        """
        target = self._lanes.target
        if not target.idle:
            return None  # it died while the others drafted
        items = []
        reader = self._lanes.speculator
        head = reader.head if reader is not None else None
        room = ORDER_BYTES
        transport = self._lanes.transport
        arena = transport.arena_for(target, reader) if head is not None else ""
        for request, *_ in plan:
            request.rows.forget_lost(transport.leases)
            if request.seq not in target.told:
                dialogue.open_at(self._lanes, target, request, len(request.tokens))
            since = dialogue.news(target, request)
            draft, q = drafts.get(request.seq, NO_GUESSES)
            rows_since = _rows_since(request, draft, head, room) if request.speculate else None
            if head is not None and rows_since is not None:
                room -= (len(request.tokens) + len(draft) - rows_since) * head.row_bytes
            items.append(
                VerifyItem(
                    *(request.seq, request.gen, len(request.tokens), since, draft, rows_since),
                    prompt_since=prompt_scores.wanted_since(request),
                    q=dialogue.q_rows(self._lanes, target, q) if q else q,
                )
            )
        taps = head.taps if head is not None else ()
        number = next(dialogue.order_numbers)
        self._lanes.ask(target, Verify(target.epoch, number, items, taps, PREFILL_TOKENS, arena))
        reply = self._lanes.reply(target, time.monotonic() + self._seconds)
        if not isinstance(reply, Verified):
            if reply == NoReply("timeout"):
                self._lanes.supervisor.condemn(target, f"no verdict within {self._seconds:g} s")
            if reply != NoReply("halted"):
                self._strike(plan, target)
            return None
        reason = self._contradiction(items, reply, vocabulary_size, head) or _wrong_scores(plan, reply)
        if reason:
            self._lanes.supervisor.take_down(target, reason)
            self._strike(plan, target)
            return None
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
                request.rows.add(told.rows, head.window, transport.leases)
        return Verdicts(verdicts, reply.busy_ns)

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
