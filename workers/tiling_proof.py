"""The proof at load that attention gives a row the same bits in every tile, place, batch and length.

Knows what is tried; what it is tried with is `workers.attention`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.attention import ROW_BY_ROW, PagedAttention, Span, Tiling, blocked
from workers.blocks import BlockPool, blocks_for
from workers.kv import PagedKV

if TYPE_CHECKING:
    from torch import Tensor

    from workers.attention import Kernel

TILES = (2, 4, 6, 8, 12, 16, 32, 64)
REDUCTIONS = (192, 128, 64)


def prove_tiling(
    kv_heads: int,
    query_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kernel: Kernel = blocked,
) -> Tiling:
    """The tiling with most tiles whose rows are bitwise alike in every tile, place, batch and length tried.

    Deterministic; takes about a tenth of a second. Falls back to ROW_BY_ROW, which needs no proof: there, the
    shapes of a call are a function of the row's position alone.
    """
    trial = _Trial(kv_heads, query_heads, head_dim, dtype, device, kernel)
    best = ROW_BY_ROW
    for reduction in REDUCTIONS:
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
    """Random keys, values and queries of two sequences, and the same rows computed in different company."""

    # Places around the lengths at which libraries were seen to change the order of summation.
    STARTS = (3, 60, 186, 250, 310, 505)
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
        everything = torch.randn(shape, generator=generator).to(dtype).to(device)
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
