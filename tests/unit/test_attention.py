"""Attention over blocks: right against plain attention, and bitwise the same in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.attention import PLAIN, ROW_BY_ROW, PagedAttention, Span, Tiling, blocked, largest_need
from workers.blocks import BLOCK, BlockPool, blocks_for
from workers.kv import PagedKV
from workers.tiling_proof import TILES, prove_tiling

SEQS, LENGTH = 8, 600
SHAPES = {"grouped": (3, 9, 64), "multi-query": (1, 4, 16), "one to one": (2, 2, 80)}


class Bench:
    """Random queries, keys and values for every position of some sequences, all of which are written.

    The sequences' blocks lie between each other's.
    """

    def __init__(self, shape, tiling=None, dtype=torch.float32):
        self.kv_heads, self.query_heads, self.head_dim = shape
        self.tiling = tiling or prove_tiling(*shape, torch.float32, "cpu")
        pool = BlockPool(SEQS * blocks_for(LENGTH))
        self.kv = PagedKV(1, pool, self.kv_heads, self.head_dim, dtype, "cpu")
        heads = self.query_heads + 2 * self.kv_heads
        generator = torch.Generator().manual_seed(1)
        self.qkv = torch.randn(SEQS, LENGTH, heads, self.head_dim, generator=generator)
        self.qkv[:, :, self.query_heads :] = self.qkv[:, :, self.query_heads :].to(dtype)
        self.attention = PagedAttention(self.kv, self.query_heads, torch.float32, self.tiling)
        for seq in range(SEQS):
            pool.open(seq)
        for first in range(0, LENGTH, BLOCK):
            for seq in range(SEQS):
                part = self.qkv[seq, first : first + BLOCK, self.query_heads :]
                self.kv.reserve(seq, len(part))
                places = self.kv.places([seq] * len(part), range(first, first + len(part)))
                self.kv.write(0, part, places)
                pool.append(seq, [seq] * len(part))

    def run(self, *spans, rows=0, sliding_window=0):
        parts = [self.qkv[span.seq, span.start : span.start + span.length] for span in spans]
        packed = torch.cat(parts)
        if rows > len(packed):
            packed = F.pad(packed, (0, 0, 0, 0, 0, rows - len(packed)))
        step = self.attention.plan(spans, rows, sliding_window)
        return self.attention.attend(0, packed, step, self.head_dim**-0.5)

    def oracle(self, seq, position, sliding_window=0):
        first = max(0, position + 1 - sliding_window) if sliding_window else 0
        per_head = self.query_heads // self.kv_heads
        seen = self.qkv[seq, first : position + 1, self.query_heads :].double().transpose(0, 1)
        keys = seen[: self.kv_heads].repeat_interleave(per_head, 0)
        values = seen[self.kv_heads :].repeat_interleave(per_head, 0)
        query = self.qkv[seq, position, : self.query_heads, None].double()
        return F.scaled_dot_product_attention(query, keys, values).flatten()


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", params=SHAPES)
def bench(request):
    return Bench(SHAPES[request.param])


MIXED = [Span(2, 100, 5), Span(0, 317, 6), Span(1, 60, 70), Span(3, 4, 1), Span(7, 590, 8)]


@pytest.mark.parametrize("tiling", [PLAIN, ROW_BY_ROW, None])
@pytest.mark.parametrize("sliding_window", [0, 1, 33])
def test_rows_are_those_of_plain_attention(tiling, sliding_window):
    bench = Bench(SHAPES["grouped"], tiling)
    rows = iter(bench.run(*MIXED, rows=96, sliding_window=sliding_window))
    for span in MIXED:
        for position in range(span.start, span.start + span.length):
            expected = bench.oracle(span.seq, position, sliding_window)
            assert (next(rows) - expected).abs().max() < 1e-5


def test_keys_in_a_narrower_type_are_widened():
    bench = Bench(SHAPES["grouped"], dtype=torch.bfloat16)
    rows = iter(bench.run(*MIXED))
    for span in MIXED:
        for position in range(span.start, span.start + span.length):
            assert (next(rows) - bench.oracle(span.seq, position)).abs().max() < 1e-5


def test_keys_and_values_of_the_step_are_stored_and_padding_is_not():
    bench = Bench(SHAPES["grouped"])
    for seq in range(SEQS):
        places = bench.kv.places([seq] * LENGTH, range(LENGTH))
        bench.kv.write(0, torch.zeros(LENGTH, 6, 64), places)
    bench.run(Span(4, 10, 2), rows=8)
    pieces = bench.kv.pieces(range(SEQS), blocks_for(LENGTH))
    keys, values = bench.kv.read(0, pieces, SEQS, torch.float32)
    written = keys.view(SEQS, 3, -1, 64).any(dim=3).any(dim=1)
    assert written.nonzero().tolist() == [[4, 10], [4, 11]]
    assert torch.equal(values[4 * 3 : 5 * 3, 10:12].transpose(0, 1), bench.qkv[4, 10:12, 12:])


def test_equal_tiles_that_see_about_as_much_share_a_call():
    bench = Bench(SHAPES["grouped"])
    spans = [Span(3, 9, 2), Span(1, 150, 2), Span(2, 70, 1), Span(5, 0, 6), Span(4, 500, 1)]
    groups = bench.attention.plan(spans).groups
    assert [(group.pieces, group.length) for group in groups] == [(1, 512), (2, 192), (1, 64), (1, 64)]


def test_a_call_gathers_so_many_blocks_and_no_more():
    bench = Bench(SHAPES["grouped"])
    groups = bench.attention.plan([Span(seq, 590, 1) for seq in range(SEQS)]).groups
    assert [(group.pieces, group.length) for group in groups] == [(2, 640)] * 4


def test_a_long_window_is_cut_into_tiles():
    bench = Bench(SHAPES["grouped"])
    groups = bench.attention.plan([Span(0, 0, 130)]).groups
    assert [group.mask.shape[1] // 3 for group in groups] == [2, 64]
    assert [(group.pieces, group.length) for group in groups] == [(1, 192), (2, 128)]


SPANS = st.lists(
    st.tuples(st.integers(0, LENGTH - 1), st.integers(1, 80)), min_size=1, max_size=SEQS
).flatmap(
    lambda windows: st.permutations(range(SEQS)).map(lambda seqs: list(zip(seqs, windows, strict=False)))
)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(spans=SPANS, data=st.data())
def test_a_row_is_bitwise_the_same_in_any_company(bench, spans, data):
    spans = [Span(seq, start, min(length, LENGTH - start)) for seq, (start, length) in spans]
    rows = bench.run(*spans)
    first = 0
    for span in spans:
        offset = data.draw(st.integers(0, span.length - 1))
        alone = bench.run(Span(span.seq, span.start + offset, 1))
        assert torch.equal(rows[first + offset], alone[0])
        first += span.length


def test_a_row_is_the_same_for_any_number_of_threads(bench):
    spans = [Span(seq, 180 + 13 * seq, 16) for seq in range(SEQS)]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = bench.run(*spans)
        torch.set_num_threads(2)
        assert torch.equal(bench.run(*spans), one)
    finally:
        torch.set_num_threads(threads)


def shape_dependent(where):
    """The blocked kernel, but off by a little where the call's shape says so."""

    def kernel(queries, keys, values, mask, scale, reduction, out):
        blocked(queries, keys, values, mask, scale, reduction, out)
        if where(queries.shape[1], keys.shape[1], queries.shape[0], reduction):
            out.mul_(1 + 1e-6)

    return kernel


@pytest.mark.parametrize(
    ("where", "tiles", "reduction"),
    [
        (lambda rows, length, batch, reduction: False, TILES, 192),
        # Two query heads per KV head: 32 rows are a tile of 16.
        (lambda rows, length, batch, reduction: rows > 32, (2, 4, 6, 8, 12, 16), 192),
        (lambda rows, length, batch, reduction: reduction > 128 and rows > 4, TILES, 128),
        (lambda rows, length, batch, reduction: reduction > 64 and length > 256, TILES, 64),
    ],
)
def test_the_proof_drops_what_differs(where, tiles, reduction):
    found = prove_tiling(1, 2, 16, torch.float32, "cpu", shape_dependent(where))
    assert (found.tiles, found.reduction, found.alone) == (tiles, reduction, False)


@pytest.mark.parametrize(
    "where",
    [
        lambda rows, length, batch, reduction: batch > 1,
        lambda rows, length, batch, reduction: length > 256 and length % 128,
    ],
)
def test_the_proof_falls_back_to_row_by_row(where):
    assert prove_tiling(1, 2, 16, torch.float32, "cpu", shape_dependent(where)) == ROW_BY_ROW


def test_row_by_row_is_exact_by_construction():
    """Even a kernel whose bits depend on every dimension of the call cannot tell company then."""
    bench = Bench(SHAPES["grouped"], ROW_BY_ROW)
    kernel = shape_dependent(lambda rows, length, batch, reduction: (rows * length + batch) % 5 > 1)
    bench.attention = PagedAttention(bench.kv, 9, torch.float32, ROW_BY_ROW, kernel)
    rows = iter(bench.run(*MIXED))
    for span in MIXED:
        for position in range(span.start, span.start + span.length):
            assert torch.equal(next(rows), bench.run(Span(span.seq, position, 1))[0])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    tiling=st.sampled_from([PLAIN, ROW_BY_ROW, Tiling((2, 64), 64), Tiling((2, 4, 8), 64)]),
    spans=st.lists(st.tuples(st.integers(0, 2000), st.integers(1, 64)), min_size=1, max_size=12),
)
def test_no_pass_needs_more_than_what_is_reserved_for_all(tiling, spans):
    rows, length = 64, 2064
    pool = BlockPool(len(spans) * blocks_for(length), reuse=False)
    attention = PagedAttention(PagedKV(1, pool, 2, 8, torch.float32, "cpu"), 6, torch.float32, tiling)
    taken, room = [], rows
    for seq, (start, count) in enumerate(spans):
        if room == 0:
            break
        pool.open(seq)
        pool.reserve(seq, length)
        taken.append(Span(seq, start, min(count, room)))
        room -= taken[-1].length
    need, most = attention.plan(taken, rows).need(rows), largest_need(tiling, (6, 2), rows, length)
    assert all(one <= bound for one, bound in zip(need, most, strict=True)), (need, most)
