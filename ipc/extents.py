"""Which bytes of an arena are taken: first fit over a sorted list of gaps. Pure: knows no memory.

Slots live for about as long as each other, so gaps close again and first fit does well enough.
"""

from __future__ import annotations

from bisect import bisect_left

from ipc.descriptor import ALIGNMENT


class Extents:
    """Of `nbytes` bytes. Offsets and sizes of what is handed out are multiples of ALIGNMENT."""

    def __init__(self, nbytes: int) -> None:
        self._gaps = [(0, nbytes // ALIGNMENT * ALIGNMENT)]
        self._taken: dict[int, int] = {}

    @property
    def free(self) -> int:
        """Bytes, perhaps not in one piece."""
        return sum(size for _, size in self._gaps)

    def take(self, nbytes: int) -> int | None:
        """The offset of so many bytes (at least one), or None if there is no gap for them."""
        wanted = -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT
        for index, (offset, size) in enumerate(self._gaps):
            if size >= wanted:
                if size == wanted:
                    del self._gaps[index]
                else:
                    self._gaps[index] = (offset + wanted, size - wanted)
                self._taken[offset] = wanted
                return offset
        return None

    def give(self, offset: int) -> None:
        """Back what `take` handed out. Raises KeyError for another offset."""
        size = self._taken.pop(offset)
        index = bisect_left(self._gaps, (offset, 0))
        if index < len(self._gaps) and self._gaps[index][0] == offset + size:
            size += self._gaps.pop(index)[1]
        if index and sum(self._gaps[index - 1]) == offset:
            offset, before = self._gaps.pop(index - 1)
            size, index = size + before, index - 1
        self._gaps.insert(index, (offset, size))
