"""The verify step of a round: the target judges, and its verdicts are checked before they are committed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from executor import dialogue
from executor.lanes import NoReply
from ipc.messages import Verified, Verify, VerifyItem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.lane import Lane
    from executor.lanes import Lanes
    from executor.plan import Step
    from ipc.messages import VerifiedItem


class Verifying:
    def __init__(self, lanes: Lanes, seconds: float) -> None:
        """`seconds`: after so long without a verdict the target counts as hung."""
        self._lanes = lanes
        self._seconds = seconds
        self.died_of = ""
        """What the target died of, the last time that it died over sequences."""

    def run(
        self, plan: Sequence[Step], drafts: dict[int, list[int]], vocabulary_size: int
    ) -> tuple[dict[int, VerifiedItem], int] | None:
        """A verdict for every sequence of the plan, and the nanoseconds that the target computed.

        None if there will be none: the target is gone, or the executor is closing. If it died over them, that
        is a strike for each; nothing is committed, and they go on where they were.
        """
        target = self._lanes.target
        if not target.idle:
            return None  # it died while the others drafted
        items = []
        for request, _ in plan:
            if request.seq not in target.told:
                dialogue.open_at(self._lanes, target, request, len(request.tokens))
            since = dialogue.news(target, request)
            draft = drafts.get(request.seq, [])
            items.append(VerifyItem(request.seq, request.gen, len(request.tokens), since, draft))
        self._lanes.ask(target, Verify(target.epoch, next(dialogue.order_numbers), items))
        reply = self._lanes.reply(target, time.monotonic() + self._seconds)
        if not isinstance(reply, Verified):
            if reply == NoReply("timeout"):
                self._lanes.supervisor.condemn(target, f"no verdict within {self._seconds:g} s")
            if reply != NoReply("halted"):
                self._strike(plan, target)
            return None
        verdicts = {item.seq: item for item in reply.items}
        reason = (
            f"{len(reply.items)} verdicts on {len(items)} drafts" if len(reply.items) != len(items) else ""
        )
        for item in items:
            verdict = verdicts.get(item.seq)
            if not _possible(item, verdict, vocabulary_size):
                reason = f"impossible verdict {verdict} on {item}"
        if reason:
            self._lanes.supervisor.take_down(target, reason)
            self._strike(plan, target)
            return None
        return verdicts, reply.busy_ns

    def _strike(self, plan: Sequence[Step], target: Lane) -> None:
        self.died_of = target.down_because
        for request, _ in plan:
            request.strikes += 1


def _possible(asked: VerifyItem, verdict: VerifiedItem | None, vocabulary_size: int) -> bool:
    return (
        verdict is not None
        and (verdict.gen, verdict.base_len) == (asked.gen, asked.base_len)
        and 0 <= verdict.n_accepted <= len(asked.draft)
        and 0 <= verdict.next_token < vocabulary_size
        and len(verdict.logprobs) in (0, verdict.n_accepted + 1)
    )
