"""The hidden rows that a drafting head reads: which are wanted of a forward pass, and what came of it.

Knows no engine. An engine that can show its rows fills a tap while it runs; see Tapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from ipc.messages import HiddenRows
    from workers.engines.engine import Window

    Pack = Callable[[int, Any], HiddenRows]
    """From the first row's position and rows [n, features] in bfloat16 to what is sent of them."""


class Tap:
    """`layers`: after how many layers parts of a row are taken. `since`: of sequences whose rows are wanted,
    the first position."""

    def __init__(self, layers: Sequence[int], since: Mapping[int, int], pack: Pack) -> None:
        self.layers = tuple(layers)
        self._since = since
        self._pack = pack
        self._kept: dict[int, list[tuple[int, Any]]] = {}

    def wanted(self, seq: int, start: int, length: int) -> range:
        """Which of the rows at positions start, …, start + length - 1 are wanted, counted from start."""
        since = self._since.get(seq)
        return range(length if since is None else min(length, max(0, since - start)), length)

    def keep(self, seq: int, start: int, rows: Any) -> None:
        """`rows`: [n, features] in bfloat16 of positions from `start` on. They must stay what they are."""
        self._kept.setdefault(seq, []).append((start, rows))

    def rows(self, seq: int, end: int) -> list[HiddenRows]:
        """What was kept of positions below `end`, to be sent; each time anew, so this is asked once."""
        kept = self._kept.get(seq, ())
        return [self._pack(start, rows[: end - start]) for start, rows in kept if start < end]


@runtime_checkable
class Tapped(Protocol):
    """An engine that can show its hidden rows."""

    def forward(self, windows: Sequence[Window], tap: Tap | None = None) -> Any:
        """See Engine; the tap is filled on the way."""
        ...

    @property
    def layers(self) -> int:
        """How many there are to take rows after."""
        ...
