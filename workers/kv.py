"""Keys and values of the sequences that a lane holds, in blocks: one storage per layer.

Owns the storage; which block is whose, is the pool's to say (`workers.blocks`). Knows neither models nor
masks: what lies beyond a sequence's length in its last block is stale or zero, and whoever reads it has to
mask it.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers.blocks import BLOCK, BlockPool

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class PagedKV:
    """Storage [2 (keys, values), kv_heads, blocks + 1, BLOCK, head_dim] per layer; the last block is zero.

    So a block of one head is one piece of memory, and reading is a gather of whole pieces.
    """

    def __init__(
        self,
        layers: int,
        pool: BlockPool,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.layers = layers
        self.pool = pool
        self.kv_heads = kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self._blocks = pool.blocks + 1
        self._storage = _zeros((layers, 2 * kv_heads, self._blocks, BLOCK * head_dim), dtype, self.device)
        self._pieces = [layer.view(-1, BLOCK * head_dim) for layer in self._storage]
        self._rows = [layer.view(-1, head_dim) for layer in self._storage]
        heads = np.arange(2 * kv_heads, dtype=np.int64)
        self._first_piece = heads * self._blocks

    def reserve(self, seq: int, count: int) -> None:
        """Make room for `count` more positions of a sequence. Raises MemoryError if there is none."""
        fresh, copied = self.pool.reserve(seq, count)
        if fresh:
            # What is no number, left behind by a sequence that came to grief, would pass through every mask.
            self._storage[:, :, fresh] = 0
        if copied is not None:
            source, target = copied
            self._storage[:, :, target] = self._storage[:, :, source]

    def places(self, seqs: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Where `write` has to put the keys and values of tokens: int64 [tokens, 2 · kv_heads]."""
        tables = {seq: self.pool.table(seq) for seq in set(seqs)}
        block = [tables[seq][at // BLOCK] for seq, at in zip(seqs, positions, strict=True)]
        offset = np.asarray(positions, dtype=np.int64) % BLOCK
        piece = self._first_piece + np.asarray(block, dtype=np.int64)[:, None]
        return self._tensor(piece * BLOCK + offset[:, None])

    def pieces(self, seqs: Sequence[int], blocks: int) -> Tensor:
        """What `read` has to gather for the first `blocks` blocks of each sequence, zeros where it has fewer.

        int64 [2 · sequences · kv_heads · blocks]
        """
        tables = np.full((len(seqs), blocks), self._blocks - 1, dtype=np.int64)
        for row, seq in zip(tables, seqs, strict=True):
            table = self.pool.table(seq)[:blocks]
            row[: len(table)] = table
        first = self._first_piece.reshape(2, 1, self.kv_heads, 1)
        return self._tensor((first + tables[None, :, None, :]).reshape(-1))

    def write(self, layer: int, rows: Tensor, places: Tensor) -> None:
        """Store rows [tokens, 2 · kv_heads, head_dim], the heads of the keys before those of the values."""
        self._rows[layer][places] = rows.to(self.dtype)

    def read(
        self,
        layer: int,
        pieces: Tensor,
        sequences: int,
        dtype: torch.dtype,
        gathered: Tensor | None = None,
        widened: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences · kv_heads, blocks · BLOCK, head_dim] that `pieces` names, in `dtype`.

        `gathered` and `widened` are storage to work in, [at least as many pieces, BLOCK · head_dim], in the
        type of the KV and in `dtype`: then the result stands there, until the next read.
        """
        count = len(pieces)
        room = None if gathered is None else gathered[:count]
        gathered = torch.index_select(self._pieces[layer], 0, pieces, out=room)
        if dtype != self.dtype:
            gathered = gathered.to(dtype) if widened is None else widened[:count].copy_(gathered)
        both = gathered.view(2, sequences * self.kv_heads, -1, self.head_dim)
        return both[0], both[1]

    def nbytes(self) -> int:
        """Address space taken; on a CPU only what was written is resident."""
        return self._storage.nbytes

    def _tensor(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.device)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU fresh pages from the system, which take memory only once they are written.

    Small pages, which numpy and torch do not promise: with huge ones the first token of each head and block
    would take two megabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private, since reading a page of a shared mapping takes memory, too.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
