"""Causal attention over paged KV whose result for a row does not depend on what is computed beside it.

Owns the masks, the grouping of windows into batches of matrices and the order of summation. Knows of a model
only its heads: rotary embedding, projections and norms are the caller's.

A library's matrix product sums in an order that depends on the shapes of the whole call. Three rules
prevent that. Query rows come in tiles of at least two, since one row takes another kernel. Keys are read in
whole blocks, masked by -inf, which adds exact zeros. Products with the values are taken over short, fixed
ranges of keys and summed in order of position, since long sums are split by their length. If that is enough
on the machine at hand is tried by `workers.tiling_proof`; where it is not, a call has one query row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from workers.blocks import BLOCK, blocks_for
from workers.scratch import NONE, Attending, Need

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from workers.kv import PagedKV


class Span(NamedTuple):
    """Query rows of the sequence `seq`, at positions start, …, start + length - 1."""

    seq: int
    start: int
    length: int


class Tiling(NamedTuple):
    """How rows are cut into calls.

    tiles: numbers of query rows per sequence that a call may have, ascending; smaller ones are padded up.
    reduction: keys summed over by one product with the values; 0 is left to the kernel.
    alone: a call has one row of one sequence and reads no further than that row sees.
    """

    tiles: tuple[int, ...]
    reduction: int
    alone: bool = False


PLAIN = Tiling((1, 2, 4, 8, 16, 32, 64), 0)
ROW_BY_ROW = Tiling((2,), 64, alone=True)

_CALL_BLOCKS = 24
"""So many blocks of keys are gathered for one call at most, unless one sequence has more."""

Kernel = Callable[..., None]


def blocked(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    reduction: int,
    out: Tensor,
    scores: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """out = softmax(scale · queries keysᵀ + mask) values, summed over `reduction` keys at a time (0: all).

    queries and out [batch, rows, head_dim], keys and values [batch, length, head_dim],
    mask [batch, rows, length]. `scores` and `weights` are storage to work in, of the mask's shape.
    """
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale, out=scores)
    weights = torch.softmax(scores, dim=-1, out=weights)
    length = keys.shape[1]
    step = reduction or length
    torch.bmm(weights[:, :, :step], values[:, :step], out=out)
    for first in range(step, length, step):
        out.baddbmm_(weights[:, :, first : first + step], values[:, first : first + step])


def fused(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    reduction: int,
    out: Tensor,
) -> None:
    """The same by the library's own kernel, which on CPUs with bfloat16 arithmetic keeps sums in float32.

    It reads keys in blocks of its own, from the first on, so `reduction` has to be 0.
    """
    result = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], attn_mask=mask[None], scale=scale
    )
    out.copy_(result[0])


@dataclass(frozen=True, slots=True)
class Group:
    """One call of the kernel: the same number of rows for each of some pieces; `keys`: see PagedKV.pieces."""

    pieces: int
    length: int
    keys: Tensor
    queries: Tensor
    mask: Tensor
    out: slice


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers of a forward pass share: where keys go, what rows attend to, where results go."""

    tokens: int
    places: Tensor
    groups: tuple[Group, ...]
    outputs: int
    gather: Tensor
    scratch: Attending = NONE.attending

    def need(self, rows: int) -> Need:
        """Storage for a pass of so many rows, padding included."""
        groups = self.groups
        return Need(
            rows,
            self.outputs,
            max((len(group.queries) for group in groups), default=0),
            max((len(group.keys) for group in groups), default=0),
            max((group.mask.numel() for group in groups), default=0),
        )

    def within(self, scratch: Attending) -> Step:
        """The same, to be run in this storage."""
        return replace(self, scratch=scratch)


class _Piece(NamedTuple):
    """A part of a span that one call computes; `row` is the place of its first row among all rows."""

    seq: int
    start: int
    length: int
    row: int

    @property
    def blocks(self) -> int:
        """Blocks of keys that its last row sees."""
        return blocks_for(self.start + self.length)


class PagedAttention:
    """Grouped-query attention of windows of several sequences over a PagedKV.

    Query head h belongs to KV head h // (query_heads / kv_heads).
    """

    def __init__(
        self,
        kv: PagedKV,
        query_heads: int,
        dtype: torch.dtype,
        tiling: Tiling,
        kernel: Kernel = blocked,
    ) -> None:
        """`dtype`: of queries, arithmetic and results; keys and values are stored in that of `kv`."""
        self.kv = kv
        self._dtype = dtype
        self.tiling = tiling
        self._kernel = kernel
        self._query_heads = query_heads
        self._per_kv_head = query_heads // kv.kv_heads
        head = np.arange(query_heads, dtype=np.int64)
        self._kv_head, self._member = np.divmod(head, self._per_kv_head)

    def plan(self, spans: Sequence[Span], rows: int = 0, sliding_window: int = 0) -> Step:
        """Prepare a step over the rows of `spans`, in their order, followed by padding up to `rows` rows.

        There is room reserved for all of them. A row at position p sees sliding_window positions up to p (0:
        all).
        """
        tokens = sum(span.length for span in spans)
        seqs = [span.seq for span in spans for _ in range(span.length)]
        positions = [position for span in spans for position in range(span.start, span.start + span.length)]
        gather = np.zeros((max(rows, tokens), self._query_heads), dtype=np.int64)
        groups: list[Group] = []
        outputs = 0
        for tile, pieces in self._batches(spans):
            groups.append(self._group(tile, pieces, outputs, sliding_window))
            for index, piece in enumerate(pieces):
                row = np.arange(piece.length, dtype=np.int64)[:, None]
                head = (index * self.kv.kv_heads + self._kv_head) * tile * self._per_kv_head
                gather[piece.row : piece.row + piece.length] = (
                    outputs + head + row * self._per_kv_head + self._member
                )
            outputs += len(pieces) * tile * self._query_heads
        places = self.kv.places(seqs, positions)
        return Step(tokens, places, tuple(groups), outputs, self._tensor(gather.reshape(-1)))

    def attend(self, layer: int, qkv: Tensor, step: Step, scale: float) -> Tensor:
        """Store keys and values of the step's tokens, then attend: [rows, query_heads · head_dim].

        qkv: contiguous [rows, query_heads + 2 · kv_heads, head_dim], queries before keys before values.
        """
        kv, scratch = self.kv, step.scratch
        kv.write(layer, qkv[: step.tokens, self._query_heads :], step.places)
        qkv = qkv.to(self._dtype)
        heads = qkv.view(-1, kv.head_dim)
        out = scratch.outputs
        if out is None:
            out = torch.empty((step.outputs, kv.head_dim), dtype=qkv.dtype, device=qkv.device)
        for group in step.groups:
            room = _first(scratch.queries, len(group.queries))
            queries = torch.index_select(heads, 0, group.queries, out=room)
            queries = queries.view(group.pieces * kv.kv_heads, -1, kv.head_dim)
            keys, values = kv.read(
                layer, group.keys, group.pieces, qkv.dtype, scratch.gathered, scratch.widened
            )
            result = out[group.out].view(queries.shape)
            rooms = _rooms(scratch, group.mask)
            self._kernel(queries, keys, values, group.mask, scale, self.tiling.reduction, result, *rooms)
        attended = torch.index_select(out, 0, step.gather, out=scratch.attended)
        return attended.view(-1, self._query_heads * kv.head_dim)

    def _batches(self, spans: Sequence[Span]) -> list[tuple[int, list[_Piece]]]:
        """Cut spans into tiles; those of the same size that see about as many blocks go together."""
        tiles = self.tiling.tiles
        largest = 1 if self.tiling.alone else tiles[-1]
        pieces = []
        row = 0
        for span in spans:
            for first in range(0, span.length, largest):
                count = min(largest, span.length - first)
                tile = next(tile for tile in tiles if tile >= count)
                pieces.append((tile, _Piece(span.seq, span.start + first, count, row + first)))
            row += span.length
        batches: list[tuple[int, list[_Piece]]] = []
        for tile, piece in sorted(pieces, key=lambda item: (item[0], -item[1].blocks)):
            if batches and batches[-1][0] == tile and self._joins(piece, batches[-1][1]):
                batches[-1][1].append(piece)
            else:
                batches.append((tile, [piece]))
        return batches

    def _joins(self, piece: _Piece, batch: list[_Piece]) -> bool:
        """Whether a piece goes into one call with others, of which the first sees most."""
        blocks = batch[0].blocks
        return (
            not self.tiling.alone and 2 * piece.blocks >= blocks and blocks * (len(batch) + 1) <= _CALL_BLOCKS
        )

    def _group(self, tile: int, pieces: list[_Piece], outputs: int, sliding_window: int) -> Group:
        # Rows that only fill a tile repeat the first one of their piece: finite, and nobody reads the result.
        offset = np.arange(tile)[None, :]
        offset = np.where(offset < np.array([[piece.length] for piece in pieces]), offset, 0)
        row = np.array([[piece.row] for piece in pieces]) + offset
        position = np.array([[piece.start] for piece in pieces]) + offset
        blocks = max(piece.blocks for piece in pieces)
        length = blocks * BLOCK

        heads = self._query_heads + 2 * self.kv.kv_heads
        head = np.arange(self._query_heads).reshape(1, self.kv.kv_heads, 1, self._per_kv_head)
        queries = (row[:, None, :, None] * heads + head).astype(np.int64).reshape(-1)

        key = np.arange(length)
        hidden = key > position[..., None]
        if sliding_window:
            hidden |= key <= position[..., None] - sliding_window
        mask = self._mask(hidden, len(pieces))
        count = len(pieces) * tile * self._query_heads
        out = slice(outputs, outputs + count)
        keys = self.kv.pieces([piece.seq for piece in pieces], blocks)
        return Group(len(pieces), length, keys, self._tensor(queries), mask, out)

    def _mask(self, hidden: np.ndarray, pieces: int) -> Tensor:
        """hidden [pieces, tile, length] → 0 and -inf [pieces · kv_heads, tile · heads per KV head, …]."""
        mask = torch.from_numpy(hidden).to(self.kv.device)
        zero = torch.zeros(hidden.shape, dtype=self._dtype, device=self.kv.device)
        zero.masked_fill_(mask, float("-inf"))
        rows, length = hidden.shape[1] * self._per_kv_head, hidden.shape[2]
        per_head = zero.repeat_interleave(self._per_kv_head, dim=1).view(pieces, 1, rows, length)
        return per_head.expand(pieces, self.kv.kv_heads, rows, length).reshape(-1, rows, length)

    def _tensor(self, index: np.ndarray) -> Tensor:
        return torch.from_numpy(index).to(self.kv.device)


def _first(room: Tensor | None, count: int) -> Tensor | None:
    return None if room is None else room[:count]


def _rooms(scratch: Attending, mask: Tensor) -> tuple[Tensor, ...]:
    """For scores and weights of a group, if there is scratch storage."""
    if scratch.scores is None or scratch.weights is None:
        return ()
    count = mask.numel()
    return scratch.scores[:count].view(mask.shape), scratch.weights[:count].view(mask.shape)


def largest_need(tiling: Tiling, heads: tuple[int, int], rows: int, length: int) -> Need:
    """What no pass of `rows` rows exceeds, over sequences of at most `length`; `heads`: of queries, of KV."""
    query_heads, kv_heads = heads
    widest = 1 if tiling.alone else min(rows, tiling.tiles[-1])
    tile_of = {count: next(tile for tile in tiling.tiles if tile >= count) for count in range(1, widest + 1)}
    padded = math.ceil(rows * max(tile / count for count, tile in tile_of.items()))
    blocks = blocks_for(length) if tiling.alone else max(_CALL_BLOCKS, blocks_for(length))
    outputs = padded * query_heads
    scores = tile_of[widest] * query_heads * blocks * BLOCK
    return Need(rows, outputs, outputs, 2 * kv_heads * blocks, scores)
