"""The proof at load that attention gives a row the same bits in every tile, place, batch and length.

Knows what is tried; what it is tried with is `workers.attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.attention import ROW_BY_ROW, PagedAttention, Span, Tiling, blocked
from workers.blocks import BLOCK, BlockPool, blocks_for
from workers.kv import PagedKV

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from workers.attention import Kernel

TILES = (2, 4, 6, 8, 12, 16, 32, 64)
REDUCTIONS = (192, 128, 64)
_SCORE = 22
"""Keys exceed queries by so many powers of two: then scores, which are rounding errors, are about 1."""


def prove_tiling(
    kv_heads: int,
    query_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kernel: Kernel = blocked,
    reductions: Sequence[int] = REDUCTIONS,
) -> Tiling:
    """The tiling with most tiles whose rows are bitwise alike in every tile, place, batch and length tried.

    `reductions`: those to try; (0,) if the kernel takes none. Deterministic; takes some tenths of a second.
    Falls back to ROW_BY_ROW, which needs no proof: there, the shapes of a call are a function of the row's
    position alone.
    """
    trial = _Trial(kv_heads, query_heads, head_dim, dtype, device, kernel)
    best = ROW_BY_ROW
    for reduction in reductions:
        tiles = trial.agreeing(reduction)
        if len(tiles) > (0 if best.alone else len(best.tiles)):
            best = Tiling(tiles, reduction)
        if tiles == TILES:
            break
    return best


def part_agrees(
    kv_heads: int,
    query_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    tiling: Tiling,
    own: slice,
    kernel: Kernel = blocked,
) -> bool:
    """Whether the KV heads `own` and their queries, computed alone, give the bits they give among all."""
    shape = (kv_heads, query_heads, head_dim, dtype, device, kernel)
    return _Trial(*shape).agrees_with(_Trial(*shape, own), tiling)


class _Trial:
    """Keys, values and queries of two sequences, and the same rows computed in different company.

    They are such that other orders of summation show in the leading bits of the results: each term of a score
    has its opposite in it, so that scores are rounding errors; and each value in a block of keys has its
    opposite, with an equal key, half a block further on. Rows that see whole blocks are nothing but errors.
    """

    # Around lengths at which libraries were seen to change the order; the second row sees whole blocks.
    STARTS = (2, 62, 190, 254, 318, 510, 574)
    LENGTH = 640

    def __init__(
        self,
        kv_heads: int,
        query_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernel: Kernel,
        own: slice | None = None,
    ) -> None:
        """`own`: only these of the KV heads, with their queries."""
        pool = BlockPool(2 * blocks_for(self.LENGTH), reuse=False)
        self._own = own = own or slice(0, kv_heads)
        self._per_kv_head = query_heads // kv_heads
        self._kv = PagedKV(1, pool, own.stop - own.start, head_dim, dtype, device)
        self._query_heads = self._kv.kv_heads * self._per_kv_head
        self._kernel = kernel
        generator = torch.Generator().manual_seed(0)
        shape = (2, self.LENGTH, query_heads + 2 * kv_heads, head_dim)
        everything = _revealing(torch.randn(shape, generator=generator), query_heads, kv_heads)
        everything = everything.to(dtype).to(device)
        first = self._per_kv_head * own.start
        self._qkv = torch.cat(
            [
                everything[:, :, first : first + self._query_heads],
                everything[:, :, query_heads:][:, :, own],
                everything[:, :, query_heads + kv_heads :][:, :, own],
            ],
            dim=2,
        )
        query_heads = self._query_heads
        for seq in (0, 1):
            pool.open(seq)
            self._kv.reserve(seq, self.LENGTH)
            places = self._kv.places([seq] * self.LENGTH, range(self.LENGTH))
            self._kv.write(0, self._qkv[seq, :, query_heads:], places)

    def agreeing(self, reduction: int) -> tuple[int, ...]:
        """Tiles whose rows all equal those of a lone row in the smallest tile."""
        lone = self._attention(Tiling(TILES[:1], reduction))
        probes = [start + offset for start in self.STARTS for offset in (0, 1, 63)]
        expected = {position: self._run(lone, [Span(0, position, 1)])[0] for position in probes}
        return tuple(tile for tile in TILES if self._agrees(Tiling((tile,), reduction), expected))

    def agrees_with(self, part: _Trial, tiling: Tiling) -> bool:
        """Whether another trial, of some of the same heads, gives the same bits in every tile and company."""
        width, head_dim = self._per_kv_head, self._kv.head_dim
        queries = slice(part._own.start * width * head_dim, part._own.stop * width * head_dim)
        whole, alone = self._attention(tiling), part._attention(tiling)
        for tile in (1,) if tiling.alone else tiling.tiles:
            longer = Span(1, self.LENGTH - tile, tile)
            for start in self.STARTS:
                for spans in ([Span(0, start, tile)], [Span(0, start, tile), longer]):
                    if not torch.equal(self._run(whole, spans)[:, queries], part._run(alone, spans)):
                        return False
        return True

    def _agrees(self, tiling: Tiling, expected: dict[int, Tensor]) -> bool:
        attention = self._attention(tiling)
        tile = tiling.tiles[0]
        longer = Span(1, self.LENGTH - tile, tile)
        for start in self.STARTS:
            own = Span(0, start, tile)
            for spans in ([own], [own, longer]):
                rows = self._run(attention, spans)
                for position in expected.keys() & range(start, start + tile):
                    if not torch.equal(rows[position - start], expected[position]):
                        return False
        return True

    def _attention(self, tiling: Tiling) -> PagedAttention:
        return PagedAttention(self._kv, self._query_heads, self._kv.dtype, tiling, self._kernel)

    def _run(self, attention: PagedAttention, spans: list[Span]) -> Tensor:
        rows = [self._qkv[span.seq, span.start : span.start + span.length] for span in spans]
        scale = self._kv.head_dim**-0.5
        return attention.attend(0, torch.cat(rows), attention.plan(spans), scale)


def _revealing(qkv: Tensor, query_heads: int, kv_heads: int) -> Tensor:
    """Random [seqs, length, heads, head_dim], made so that results are rounding errors; see _Trial."""
    half = qkv.shape[3] // 2
    keys = slice(query_heads, query_heads + kv_heads)
    order = torch.randperm(2 * half, generator=torch.Generator().manual_seed(1))
    qkv[:, :, :query_heads, order[half:]] = qkv[:, :, :query_heads, order[:half]]
    qkv[:, :, keys, order[half:]] = -qkv[:, :, keys, order[:half]]
    qkv[:, :, keys] *= 2.0**_SCORE
    seqs, length, *rest = qkv.shape
    blocks = qkv.view(seqs, length // BLOCK, 2, BLOCK // 2, *rest)
    blocks[:, :, 1, :, keys] = blocks[:, :, 0, :, keys]
    blocks[:, :, 1, :, keys.stop :] = -blocks[:, :, 0, :, keys.stop :]
    return qkv
