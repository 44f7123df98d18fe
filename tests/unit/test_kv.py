"""Slots, lengths and places of SlotKV against a plain model: lists of numbered rows."""

from __future__ import annotations

import psutil
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.kv import BLOCK, SlotKV, blocks_up

LAYERS, SLOTS, HEADS, CAPACITY, DIM = 2, 3, 2, 70, 4


def make():
    return SlotKV(LAYERS, SLOTS, HEADS, CAPACITY, DIM, torch.float32, "cpu")


def test_lengths_round_up_to_whole_blocks():
    assert [blocks_up(length) for length in (0, 1, BLOCK, BLOCK + 1)] == [BLOCK, BLOCK, BLOCK, 2 * BLOCK]
    assert make().reach == 2 * BLOCK


def test_only_what_was_written_takes_memory():
    before = psutil.Process().memory_info().rss
    kv = SlotKV(16, 8, 4, 8192, 64, torch.float32, "cpu")
    for seq in range(kv.slots):
        kv.open(seq)
        kv.append(seq, 1)
        places = kv.places([kv.slot(seq)], [0])
        for layer in range(16):
            kv.write(layer, torch.ones(1, 2 * kv.kv_heads, kv.head_dim), places)
    taken = psutil.Process().memory_info().rss - before
    assert kv.nbytes() == 1 << 31
    assert taken < 64 << 20


def test_the_lowest_free_slot_is_given():
    kv = make()
    assert [kv.open(seq) for seq in (10, 11, 12)] == [0, 1, 2]
    kv.close(11)
    kv.close(10)
    assert kv.open(13) == 0
    assert kv.slot(12) == 2


def test_a_full_store_names_its_limit():
    kv = make()
    for seq in range(SLOTS):
        kv.open(seq)
    with pytest.raises(MemoryError, match=r"sequence 9: all 3 slots \(max_sequences\)"):
        kv.open(9)


def test_a_sequence_is_open_once():
    kv = make()
    kv.open(1)
    with pytest.raises(ValueError, match="sequence 1 is open already"):
        kv.open(1)


@pytest.mark.parametrize("call", ["close", "slot", "length"])
def test_an_unknown_sequence_is_named(call):
    with pytest.raises(KeyError, match="sequence 7 is not open"):
        getattr(make(), call)(7)


def test_growth_beyond_the_capacity_changes_nothing():
    kv = make()
    kv.open(1)
    assert kv.append(1, CAPACITY) == 0
    with pytest.raises(MemoryError, match=f"grow to {CAPACITY + 1} tokens, but max_model_len is {CAPACITY}"):
        kv.append(1, 1)
    assert kv.length(1) == CAPACITY


@pytest.mark.parametrize("length", [-1, 6])
def test_a_cut_beyond_what_is_held_is_refused(length):
    kv = make()
    kv.open(1)
    kv.append(1, 5)
    with pytest.raises(ValueError, match=f"holds 5 positions, it cannot be cut to {length}"):
        kv.truncate(1, length)


def test_unused_storage_is_zero_and_costs_no_memory():
    kv = SlotKV(4, 16, 8, 25_000, 64, torch.float32, "cpu")
    assert kv.nbytes() > 2**32
    keys, values = kv.read(3, 15, 1, BLOCK)
    assert not keys.any()
    assert not values.any()


def test_bfloat16_storage_keeps_bfloat16_rows():
    kv = SlotKV(1, 1, 1, 8, 2, torch.bfloat16, "cpu")
    kv.write(0, torch.ones(1, 2, 2, dtype=torch.bfloat16), kv.places([0], [3]))
    assert kv.read(0, 0, 1, 64)[0].sum() == 2


class Storage(RuleBasedStateMachine):
    """Whatever is opened, appended, cut and closed: a slot has one owner, and reads give what was written."""

    def __init__(self):
        super().__init__()
        self.kv = make()
        self.rows: dict[int, list[float]] = {}
        self.stamp = 0.0

    @precondition(lambda self: len(self.rows) < SLOTS)
    @rule(seq=st.integers(0, 5))
    def open(self, seq):
        if seq not in self.rows:
            self.kv.open(seq)
            self.rows[seq] = []

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def close(self, data):
        seq = data.draw(st.sampled_from(sorted(self.rows)))
        self.kv.close(seq)
        del self.rows[seq]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data):
        seq = data.draw(st.sampled_from(sorted(self.rows)))
        length = data.draw(st.integers(0, len(self.rows[seq])))
        self.kv.truncate(seq, length)
        del self.rows[seq][length:]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def append(self, data):
        """To some sequences at once, as a pass does."""
        slots, positions, stamps = [], [], []
        for seq in data.draw(st.lists(st.sampled_from(sorted(self.rows)), unique=True, min_size=1)):
            count = data.draw(st.integers(0, min(20, CAPACITY - len(self.rows[seq]))))
            start = self.kv.append(seq, count)
            assert start == len(self.rows[seq])
            new = [self.stamp + i for i in range(1, count + 1)]
            self.stamp += count
            self.rows[seq] += new
            stamps += new
            slots += [self.kv.slot(seq)] * count
            positions += range(start, start + count)
        places = self.kv.places(slots, positions)
        for layer in range(LAYERS):
            head = torch.arange(2 * HEADS)[None, :, None] / 8
            rows = torch.tensor(stamps)[:, None, None] + head + layer / 2
            self.kv.write(layer, rows.expand(-1, -1, DIM), places)

    @invariant()
    def reads_give_what_was_written(self):
        assert len({self.kv.slot(seq) for seq in self.rows}) == len(self.rows)
        for seq, rows in self.rows.items():
            assert self.kv.length(seq) == len(rows)
            for layer in range(LAYERS):
                views = self.kv.read(layer, self.kv.slot(seq), 1, len(rows))
                for side, view in enumerate(views):
                    head = torch.arange(HEADS)[:, None, None] + HEADS * side
                    expected = torch.tensor(rows)[None, :, None] + head / 8 + layer / 2
                    assert torch.equal(view, expected.expand(HEADS, -1, DIM))


TestStorage = Storage.TestCase
TestStorage.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True)
