"""The target's hidden rows of a request, kept for a speculator that reads them. Never looked into.

They are only those of the latest positions, since that is all that a head reads: enough to bring a speculator
up to date that was started again, and no more.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import HiddenRows

ORDER_BYTES = 8 << 20
"""Of rows in one message; what would pass it waits for the next one."""


class KeptRows:
    """A run of positions without a gap."""

    def __init__(self) -> None:
        self._parts: deque[HiddenRows] = deque()

    @property
    def end(self) -> int:
        """The position after the last."""
        return self._parts[-1].start + self._parts[-1].count if self._parts else 0

    def add(self, parts: Sequence[HiddenRows], window: int) -> None:
        """Go on with these; what lies more than `window` positions back is dropped, and all before a gap."""
        for part in parts:
            if part.start != self.end:
                self._parts.clear()
            self._parts.append(part)
        while self._parts and self._parts[0].start + self._parts[0].count <= self.end - window:
            self._parts.popleft()

    def since(self, position: int) -> list[HiddenRows]:
        """Those that begin at a position or later."""
        return [part for part in self._parts if part.start >= position]
