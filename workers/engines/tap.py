"""The hidden rows that a drafting head reads: which are wanted of a forward pass, and what came of it.

Knows no engine. An engine that can show its rows fills a tap while it runs; see Tapped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ipc.messages import HiddenRows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from workers.engines.engine import Window


class Tap:
    """`layers`: after how many layers parts of a row are taken. `since`: of sequences whose rows are wanted,
    the first position."""

    def __init__(self, layers: Sequence[int], since: Mapping[int, int]) -> None:
        self.layers = tuple(layers)
        self._since = since
        self._kept: dict[int, list[HiddenRows]] = {}

    def wanted(self, seq: int, start: int, length: int) -> range:
        """Which of the rows at positions start, …, start + length - 1 are wanted, counted from start."""
        since = self._since.get(seq)
        return range(length if since is None else min(length, max(0, since - start)), length)

    def keep(self, seq: int, start: int, count: int, data: bytes) -> None:
        """`data`: `count` rows in bfloat16 from position `start` on, one after the other."""
        self._kept.setdefault(seq, []).append(HiddenRows(start, count, data))

    def rows(self, seq: int, end: int) -> list[HiddenRows]:
        """What was kept of positions below `end`."""
        return [cut for rows in self._kept.get(seq, ()) if (cut := _below(rows, end)).count]


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


def _below(rows: HiddenRows, end: int) -> HiddenRows:
    count = max(0, min(rows.count, end - rows.start))
    return HiddenRows(rows.start, count, rows.data[: count * (len(rows.data) // rows.count)])
