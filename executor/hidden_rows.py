"""The target's hidden rows of a request, kept for a speculator that reads them. Never looked into.

They are only those of the latest positions, since that is all that a head reads: enough to bring a speculator
up to date that was started again, and no more. Rows in an arena are kept by keeping their slots.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from executor.leases import Leases
    from ipc.messages import HeadSpec, HiddenRows, LaneSpec

ORDER_BYTES = 8 << 20
"""Of rows in one message; what would pass it waits for the next one."""
_ROUND_TOKENS = 512
"""Of prompts and drafts, whose rows are written before older ones are let go."""
_LEAST_BYTES = 64 << 10
_MOST_BYTES = 256 << 20
"""Beyond this an arena does not grow: what finds no room goes inline."""


class KeptRows:
    """A run of positions without a gap, for heads that read the same parts of a row."""

    def __init__(self) -> None:
        self._parts: deque[HiddenRows] = deque()
        self._taps: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position after the last."""
        return self._parts[-1].start + self._parts[-1].count if self._parts else 0

    def add(self, parts: Sequence[HiddenRows], head: HeadSpec, leases: Leases) -> None:
        """Go on with these, made for `head`; what lies behind its window is dropped, and all before a gap."""
        self.fit(head, leases)
        for part in parts:
            if part.start != self.end:
                self.clear(leases)
            if part.at is not None:
                leases.keep(part.at.ref)
            self._parts.append(part)
        while self._parts and self._parts[0].start + self._parts[0].count <= self.end - head.window:
            _drop(self._parts.popleft(), leases)

    def since(self, position: int, head: HeadSpec) -> list[HiddenRows]:
        """Those that begin at a position or later, if `head` can read them."""
        return [part for part in self._parts if part.start >= position] if head.taps == self._taps else []

    def clear(self, leases: Leases) -> None:
        while self._parts:
            _drop(self._parts.popleft(), leases)

    def fit(self, head: HeadSpec, leases: Leases) -> None:
        """Forget what has to be made anew: for another head, or since the memory is gone with its lane."""
        lost = any(part.at is not None and not leases.knows(part.at.arena) for part in self._parts)
        if lost or head.taps != self._taps:
            self.clear(leases)
            self._taps = head.taps


def arena_bytes(spec: LaneSpec, heads: Iterable[HeadSpec]) -> int:
    """How large a lane's arena is to be, where these heads read: for a target, what all sequences keep."""
    if spec.lane != "target":
        return min(_MOST_BYTES, max(_LEAST_BYTES, spec.q_arena))
    needs = [
        (spec.max_sequences * (head.window + spec.num_speculative_tokens + 1) + _ROUND_TOKENS)
        * (head.row_bytes + 256)
        for head in heads
    ]
    return min(_MOST_BYTES, max([_LEAST_BYTES, *needs]))


def _drop(part: HiddenRows, leases: Leases) -> None:
    if part.at is not None:
        leases.drop(part.at.ref)
