"""How the q rows of a draft order leave the speculator: large ones by arena, others inline, within bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipc import q_rows

if TYPE_CHECKING:
    from ipc.messages import QRow
    from workers.tensor_plane import TensorPlane


class QPlacing:
    def __init__(self, plane: TensorPlane, arena: str) -> None:
        """`arena`: of this lane, empty if there is none for rows."""
        self._plane = plane
        self._arena = arena
        self._room = q_rows.MESSAGE_BYTES

    def place(self, row: QRow) -> QRow:
        """The row as it is sent. One for which there is no room is left out, and its token counts as looked
        up: that costs acceptance. It hangs on how many there are, not on what was drawn from them."""
        if self._arena and not row.tokens and len(row.weights) >= q_rows.ARENA_ROW_BYTES:
            placed = self._plane.put_q(row, self._arena)
            if placed is not None:
                return placed
        size = len(row.tokens) + len(row.weights)
        if size > self._room:
            return q_rows.LOOKED_UP
        self._room -= size
        return row
