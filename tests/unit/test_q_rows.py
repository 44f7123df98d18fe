"""What draft tokens were drawn from: packed, bounded, refused where it cannot be; pure and on tensors."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import pytest
import torch
from draws import draw, toy_lane
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import codec, q_rows
from ipc.messages import DraftItem, OpenedSequence, QRow, SamplingSpec
from workers import distribution, noise, pure_sampler, tensor_distribution
from workers.engines.toy import ToyEngine
from workers.q_row import Q
from workers.sampler import Sampler
from workers.speculator import SpeculatorLane
from workers.speculators.draft import DraftSpeculator


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_row_is_what_was_packed():
    sparse, full = q_rows.pack([7, 2], [0.5, 0.25]), q_rows.pack(None, [0.0, 0.5, 0.5])
    assert [len(sparse.tokens), len(sparse.weights), len(full.tokens)] == [8, 8, 0]
    assert q_rows.unpack(sparse)[0].tolist() == [7, 2]
    assert q_rows.unpack(full)[0] is None
    q = Q(sparse)
    assert [q.probability(7), q.probability(2), q.best] == [2 / 3, 1 / 3, 2 / 3]
    assert [q.pick(0.0), q.pick(0.66), q.pick(0.67)] == [7, 7, 2]
    assert [Q(full).pick(0.0), Q(full).pick(0.5)] == [1, 2]


def test_a_token_that_was_looked_up_is_drawn_from_itself():
    q = Q.of(q_rows.LOOKED_UP, 5)
    assert (list(q.named), q.probability(5)) == ([5], 1.0)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (q_rows.LOOKED_UP, ""),
        (q_rows.pack([1, 4], [0.5, 0.5]), ""),
        (q_rows.pack(None, [0.1] * 8), ""),
        (QRow(b"abc", b"abcd"), "no whole numbers"),
        (QRow(b"", b"abcde"), "no whole numbers"),
        (q_rows.pack([1, 4], [0.5]), "1 weights of 2 tokens"),
        (q_rows.pack(None, [0.1] * 7), "7 weights of 8 tokens"),
        (q_rows.pack([1, 4], [math.nan, 0.5]), "no probabilities"),
        (q_rows.pack([1, 4], [math.inf, 0.5]), "no probabilities"),
        (q_rows.pack([1, 4], [-0.5, 0.5]), "no probabilities"),
        (q_rows.pack([1, 8], [0.5, 0.5]), "unknown, or named twice"),
        (q_rows.pack([4, 4], [0.5, 0.5]), "unknown, or named twice"),
        (q_rows.pack([1, 2], [0.5, 0.5]), "token 4 has no weight"),
        (q_rows.pack([1, 4], [0.5, 0.0]), "token 4 has no weight"),
        (q_rows.pack(None, [1.0, 0, 0, 0, 0, 0, 0, 0]), "token 4 has no weight"),
    ],
)
def test_what_cannot_have_been_drawn_from(row, says):
    found = q_rows.fault(row, 4, 8)
    assert says in found
    assert bool(says) == bool(found)


def test_rows_fit_into_a_message():
    assert q_rows.width("sparse", 35, 49152) == 64
    assert q_rows.width("full", 35, 49152) == q_rows.ALL
    assert q_rows.width("full", 43, 49152) == 64  # 8.06 MiB
    most = 32 * 1024
    width = q_rows.width("sparse", most, 49152)
    assert width == 32
    assert most * width * 8 <= q_rows.MESSAGE_BYTES < codec.MAX_FRAME_BYTES / 1.5
    assert q_rows.width("full", 1, 1 << 21) == q_rows.ALL
    assert codec.MAX_BINARY_BYTES >= q_rows.MESSAGE_BYTES


def logits_of(seed: int, size: int) -> list[float]:
    """Some tied, some impossible."""
    drawn = random.Random(seed)
    row = [round(drawn.gauss(0, 2), 1) for _ in range(size)]
    for token in range(0, size, 7):
        row[token] = -math.inf
    row[1] = 3.0
    return [float(x) for x in torch.tensor(row)]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([5, 17, 300]),
    st.sampled_from([{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.4, "top_k": 9}]),
    st.sampled_from([q_rows.ALL, 1, 3, 64]),
    st.sampled_from([1.0, 0.6]),
)
def test_tensors_and_the_pure_rule_agree(seed, size, fields, width, reach):
    how = draw(**fields)
    row = logits_of(seed, size)
    pure = pure_sampler.distribution(row, how)
    tensors = Sampler(size, "cpu").distribution(torch.tensor(row), how)
    for token in range(size):
        assert tensors.probability(token) == pytest.approx(pure.probability(token), abs=1e-14)
    assert math.fsum(pure.probability(token) for token in range(size)) == pytest.approx(1.0, abs=1e-14)
    other = pure_sampler.distribution(logits_of(seed + 1, size), how)
    q = Q(other.row(width))
    assert tensors.overlap(q, reach) == pytest.approx(pure.overlap(q, reach), abs=1e-14)
    for i in range(20):
        assert tensors.beyond(q, reach, (i + 0.37) / 20) == pure.beyond(q, reach, (i + 0.37) / 20)
    likeliest, theirs = Q(pure.row(width)), Q(tensors.row(width))
    known = [(t, likeliest.probability(t)) for t in likeliest.named if likeliest.probability(t) > 0.0]
    assert known == [(t, theirs.probability(t)) for t in theirs.named if theirs.probability(t) > 0.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_device_gives_the_same_rows():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(8, 49152, generator=generator) * 3
    for index, how in enumerate([draw(), draw(top_k=50), draw(top_p=0.9), draw(temperature=0.4)] * 2):
        here = Sampler(49152, "cpu").distribution(logits[index], how)
        there = Sampler(49152, "cuda").distribution(logits[index].cuda(), how)
        q = Q(Sampler(49152, "cpu").distribution(logits[index - 1], how).row(64))
        assert there.overlap(q, 0.7) == pytest.approx(here.overlap(q, 0.7), abs=1e-12)
        assert there.beyond(q, 0.7, 0.3) == here.beyond(q, 0.7, 0.3)
        assert list(Q(there.row(64)).named) == list(Q(here.row(64)).named)


@pytest.mark.parametrize(
    "pick",
    [distribution.pick, lambda weights, u: tensor_distribution.pick(torch.tensor(weights).double(), u)],
)
def test_a_pick_takes_each_token_for_its_share(pick):
    weights = [0.0, 0.25, 0.0, 0.5, 0.25, 0.0]
    below = 1.0 - 2.0**-53
    assert [pick(weights, u) for u in (0.0, 0.25 * below, 0.25, 0.75 * below, 0.75, below)] == [
        1,
        1,
        3,
        3,
        4,
        4,
    ]
    tenths = [0.1] * 10
    assert pick(tenths, below) == 9  # though their sum is rounded


def test_a_fraction_is_pinned_and_keeps_apart_what_is_not_the_same_decision():
    """Changing one of these changes texts."""
    assert noise.fraction(0, 0, noise.DRAFT, 0) == PINNED[0]
    assert noise.fraction(42, 1000, noise.RECOVER, 31) == PINNED[1]
    keys = [(s, p, w, d) for s in (1, 2) for p in (5, 6) for w in range(4) for d in range(33)]
    assert len({noise.fraction(*key) for key in keys}) == len(keys)
    assert all(0.0 <= noise.fraction(*key) < 1.0 for key in keys)


PINNED = [0.6005385151332827, 0.45967039085170425]


def test_nothing_that_is_drawn_decides_over_what_is_worth_verifying():
    """Short of room, whether a guess is verified follows from those before it, whatever it is itself."""
    decided: dict[tuple[int, ...], set[int]] = defaultdict(set)
    for seed in range(200):
        lane = SpeculatorLane(DraftSpeculator(ToyEngine(toy_lane("vocabulary=6"))), None, "rejection")
        sampling = SamplingSpec(1.5, 1.0, 0, 0.0, seed, 0, (), None)
        lane.open([OpenedSequence(seq, 0, [1, 2, seq], 3, sampling) for seq in range(2)])
        first, second = lane.draft([DraftItem(seq, 0, 3, [], 2) for seq in range(2)], 3)
        assert len(first.q) == len(second.q) == 2
        assert first.worth + second.worth == 3
        decided[first.tokens[0], second.tokens[0]].add(first.worth)
    assert len(decided) > 5
    assert all(len(worths) == 1 for worths in decided.values())
    assert {worth for worths in decided.values() for worth in worths} == {1, 2}


def test_greedy_guesses_are_not_drawn():
    lane = SpeculatorLane(DraftSpeculator(ToyEngine(toy_lane("vocabulary=6"))), None, "block")
    lane.open([OpenedSequence(0, 0, [1], 1, SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None))])
    (item,) = lane.draft([DraftItem(0, 0, 1, [], 3)])
    assert (len(item.tokens), item.q) == (3, [])
