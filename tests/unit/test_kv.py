"""Paged keys and values: reads give what was written, through any table of blocks."""

from __future__ import annotations

import psutil
import pytest
import torch

from workers.blocks import BLOCK, BlockPool, blocks_for
from workers.kv import PagedKV

LAYERS, BLOCKS, HEADS, DIM = 2, 12, 2, 4


def make(dtype=torch.float32):
    return PagedKV(LAYERS, BlockPool(BLOCKS), HEADS, DIM, dtype, "cpu")


def stamps(seq, positions):
    """Rows [tokens, 2 · heads, DIM] that say which sequence, position and head they are of."""
    head = torch.arange(2 * HEADS)[None, :, None] / 8
    return (torch.tensor([*positions])[:, None, None] + 1000 * seq + head).expand(-1, -1, DIM)


def append(kv, seq, count, stamp=None):
    start = kv.pool.length(seq)
    kv.reserve(seq, count)
    positions = range(start, start + count)
    places = kv.places([seq] * count, positions)
    for layer in range(LAYERS):
        kv.write(layer, (stamps(seq if stamp is None else stamp, positions) + layer / 2).to(kv.dtype), places)
    kv.pool.append(seq, [seq] * count)


def read(kv, seq, layer=0):
    """Rows [positions, 2 · heads, DIM] of all that a sequence holds."""
    length = kv.pool.length(seq)
    keys, values = kv.read(layer, kv.pieces([seq], blocks_for(length)), 1, kv.dtype)
    return torch.cat((keys, values))[:, :length].transpose(0, 1)


def test_reads_give_what_was_written_whoever_wrote_between():
    kv = make()
    for seq in (1, 2, 3):
        kv.pool.open(seq)
    for _ in range(7):
        for seq in (1, 2, 3):
            append(kv, seq, 10 * seq)
    for seq in (1, 2, 3):
        for layer in range(LAYERS):
            assert torch.equal(read(kv, seq, layer), stamps(seq, range(70 * seq)) + layer / 2)


def test_several_sequences_are_read_at_once_the_shorter_followed_by_zeros():
    kv = make()
    for seq, count in ((1, 3), (2, BLOCK + 1)):
        kv.pool.open(seq)
        append(kv, seq, count)
    keys, values = kv.read(0, kv.pieces([2, 1], 2), 2, torch.float32)
    assert keys.shape == values.shape == (2 * HEADS, 2 * BLOCK, DIM)
    assert torch.equal(keys[2:, :3].transpose(0, 1), stamps(1, range(3))[:, :HEADS])
    assert torch.equal(values[:2, : BLOCK + 1].transpose(0, 1), stamps(2, range(BLOCK + 1))[:, HEADS:])
    assert not keys[2:, 3:].any()
    assert not values[2:, 3:].any()


def test_a_fork_reads_the_same_until_one_of_both_goes_on():
    kv = make()
    kv.pool.open(1)
    append(kv, 1, BLOCK + 2)
    kv.pool.fork(1, 2)
    append(kv, 2, 3)
    append(kv, 1, 1)
    common = stamps(1, range(BLOCK + 2))
    assert torch.equal(read(kv, 1), torch.cat((common, stamps(1, [BLOCK + 2]))))
    assert torch.equal(read(kv, 2), torch.cat((common, stamps(2, range(BLOCK + 2, BLOCK + 5)))))
    assert torch.equal(read(kv, 2, layer=1)[: BLOCK + 2], common + 0.5)


def test_a_block_is_clean_when_it_is_given_again():
    """Else numbers that are none would pass through the mask of whoever gets it next."""
    kv = make()
    for seq in (1, 2):
        kv.pool.open(seq)
        kv.reserve(seq, BLOCK)
        for layer in range(LAYERS):
            places = kv.places([seq] * BLOCK, range(BLOCK))
            if seq == 1:
                kv.write(layer, torch.full((BLOCK, 2 * HEADS, DIM), torch.nan), places)
        keys, values = kv.read(1, kv.pieces([seq], 1), 1, torch.float32)
        assert bool(keys.isnan().any()) == bool(values.isnan().any()) == (seq == 1)
        kv.pool.close(seq)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_storage_is_read_in_the_type_asked_for(dtype):
    kv = make(dtype)
    kv.pool.open(0)
    append(kv, 0, 100)
    keys, _ = kv.read(0, kv.pieces([0], 2), 1, torch.float32)
    assert keys.dtype == torch.float32
    assert torch.equal(keys[:, :100].transpose(0, 1), stamps(0, range(100))[:, :HEADS].to(dtype).float())


def test_only_what_was_written_takes_memory():
    before = psutil.Process().memory_info().rss
    kv = PagedKV(16, BlockPool(8 * 128), 4, 64, torch.float32, "cpu")
    for seq in range(8):
        kv.pool.open(seq)
        kv.reserve(seq, 1)
    taken = psutil.Process().memory_info().rss - before
    assert kv.nbytes() > 1 << 31
    assert taken < 64 << 20
