"""Keys and values of the sequences that a lane holds: one slot per sequence, one tensor per layer.

Owns the storage, which sequence has which slot and how long each is. Knows neither models nor masks: what
lies beyond a sequence's length is stale or zero, always finite, and whoever reads it has to mask it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BLOCK = 64
"""Capacities are rounded up to whole blocks of so many positions, so that reads can be rounded up, too."""


def blocks_up(length: int) -> int:
    """`length` rounded up to whole blocks, at least one."""
    return max(1, -(-length // BLOCK)) * BLOCK


class SlotKV:
    """Storage [2 (keys, values), slots, kv_heads, capacity, head_dim] per layer.

    Slots and heads are neighbouring dimensions, so the keys of consecutive slots are one batch of matrices
    without a copy. `capacity` counts tokens per slot; `reach` is the capacity rounded up to whole blocks.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.layers = layers
        self.slots = slots
        self.kv_heads = kv_heads
        self.capacity = capacity
        self.reach = blocks_up(capacity)
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (2, slots, kv_heads, self.reach, head_dim)
        self._storage = [_zeros(shape, dtype, self.device) for _ in range(layers)]
        self._flat = [storage.view(-1, head_dim) for storage in self._storage]
        self._sides = [
            (storage[0].view(-1, self.reach, head_dim), storage[1].view(-1, self.reach, head_dim))
            for storage in self._storage
        ]
        self._slot_of: dict[int, int] = {}
        self._length_of: dict[int, int] = {}

    def open(self, seq: int) -> int:
        """Give the lowest free slot. Raises MemoryError if there is none, ValueError if seq has one."""
        if seq in self._slot_of:
            raise ValueError(f"sequence {seq} is open already")
        taken = set(self._slot_of.values())
        slot = next((slot for slot in range(self.slots) if slot not in taken), None)
        if slot is None:
            raise MemoryError(f"no room for sequence {seq}: all {self.slots} slots (max_sequences) are taken")
        self._slot_of[seq] = slot
        self._length_of[seq] = 0
        return slot

    def close(self, seq: int) -> None:
        """Free the sequence's slot. Raises KeyError if it has none."""
        self.slot(seq)
        del self._slot_of[seq], self._length_of[seq]

    def slot(self, seq: int) -> int:
        """Raises KeyError if the sequence is not open."""
        try:
            return self._slot_of[seq]
        except KeyError:
            raise KeyError(f"sequence {seq} is not open") from None

    def length(self, seq: int) -> int:
        """Positions held, in tokens. Raises KeyError if the sequence is not open."""
        self.slot(seq)
        return self._length_of[seq]

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` positions. Costs nothing: no memory is touched.

        Raises ValueError if the sequence holds fewer.
        """
        held = self.length(seq)
        if not 0 <= length <= held:
            raise ValueError(f"sequence {seq} holds {held} positions, it cannot be cut to {length}")
        self._length_of[seq] = length

    def append(self, seq: int, count: int) -> int:
        """Count in the next `count` positions, which the caller is about to write; returns the first of them.

        Raises MemoryError if they exceed the capacity.
        """
        start = self.length(seq)
        if start + count > self.capacity:
            raise MemoryError(
                f"sequence {seq} would grow to {start + count} tokens, but max_model_len is {self.capacity}"
            )
        self._length_of[seq] = start + count
        return start

    def places(self, slots: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Where `write` has to put the keys and values of tokens: int64 [tokens, 2 · kv_heads]."""
        side = np.arange(2, dtype=np.int64)[:, None] * self.slots
        head = np.arange(self.kv_heads, dtype=np.int64)
        slot = np.asarray(slots, dtype=np.int64)[:, None, None]
        position = np.asarray(positions, dtype=np.int64)[:, None, None]
        index = ((side + slot) * self.kv_heads + head) * self.reach + position
        return torch.from_numpy(index.reshape(len(index), 2 * self.kv_heads)).to(self.device)

    def write(self, layer: int, rows: Tensor, places: Tensor) -> None:
        """Store rows [tokens, 2 · kv_heads, head_dim], the heads of the keys before those of the values."""
        self._flat[layer][places] = rows

    def read(self, layer: int, slot: int, slots: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of keys and values [slots · kv_heads, length, head_dim] of `slots` slots from `slot` on."""
        first, last = slot * self.kv_heads, (slot + slots) * self.kv_heads
        keys, values = self._sides[layer]
        return keys[first:last, :length], values[first:last, :length]

    def nbytes(self) -> int:
        """Address space taken; on a CPU only what was written is resident."""
        return sum(storage.nbytes for storage in self._storage)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU fresh pages from the system, which take memory only once they are written.

    Small pages, which numpy and torch do not promise: with huge ones the first token of each head and slot
    would take two megabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private, since reading a page of a shared mapping takes memory, too.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
