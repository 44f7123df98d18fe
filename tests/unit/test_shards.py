"""Who has which part of a model: everything is somebody's, nothing twice, and cut where it may be."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.engines.native.config import ModelConfig
from workers.engines.native.shards import UNIT, Cut, cut, split, uncut, whole

SMOLLM2 = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    layers=30,
    query_heads=9,
    kv_heads=3,
    head_dim=64,
    norm_eps=1e-5,
    context=2048,
    tied=True,
    query_key_norm=False,
    sliding_window=0,
    inverse_frequencies=np.ones(32, dtype=np.float32),
)


@given(st.integers(1, 5000), st.integers(1, 9), st.sampled_from([1, UNIT]))
def test_a_cut_covers_everything_once_in_whole_units(size, ranks, unit):
    made = cut(size, ranks, unit)
    if not made.is_cut:
        assert ranks == 1 or -(-size // unit) < ranks
        assert [made.of(rank) for rank in range(ranks)] == [slice(0, size)] * ranks
        return
    parts = [made.of(rank) for rank in range(ranks)]
    assert (parts[0].start, parts[-1].stop) == (0, size)
    assert all(before.stop == after.start for before, after in pairwise(parts))
    assert all(part.start % unit == 0 and part.start < part.stop for part in parts)
    # As even as units allow, and never more for a later rank.
    assert list(made.widths) == sorted(made.widths, reverse=True)
    assert made.widths[0] - made.widths[-1] < 2 * unit
    assert made.times(3) == Cut(3 * size, tuple(3 * width for width in made.widths))


def test_three_heads_of_keys_and_values_for_two_ranks():
    shards = split(SMOLLM2, 0, 2, paired=False)
    assert (shards.heads.widths, shards.attended.widths, shards.inner.widths) == (
        (2, 1),
        (320, 256),
        (768, 768),
    )
    assert (shards.down.widths, shards.vocabulary.widths) == ((320, 256), (24576, 24576))
    assert shards.hidden.widths == (320, 256)
    assert shards.uncut == []
    owns = [split(SMOLLM2, rank, 2, paired=False).config(SMOLLM2) for rank in (0, 1)]
    assert [(own.query_heads, own.kv_heads) for own in owns] == [(6, 2), (3, 1)]
    assert owns[0].hidden_size == 576


def test_pairs_cut_the_inputs_of_what_follows_and_none_of_its_outputs():
    shards = split(SMOLLM2, 1, 3, paired=True)
    assert shards.paired
    assert (shards.heads.widths, shards.inner.widths) == ((1, 1, 1), (512, 512, 512))
    assert not shards.attended.is_cut
    assert not shards.down.is_cut
    assert shards.vocabulary.is_cut


def test_one_rank_has_all():
    shards = whole(SMOLLM2)
    assert not shards.paired
    assert shards.config(SMOLLM2) == SMOLLM2
    assert shards.heads == uncut(3)
    assert shards.hidden.of(0) == slice(0, 576)


def test_what_is_too_small_is_not_cut():
    small = replace(SMOLLM2, hidden_size=96, intermediate_size=112, vocab_size=211)
    shards = split(small, 2, 3, paired=False)
    assert (shards.attended, shards.inner, shards.down) == (uncut(96), uncut(112), uncut(96))
    assert shards.vocabulary.widths == (128, 64, 19)
    assert shards.uncut == ["its output", "the network", "its output layer"]


def test_more_ranks_than_heads_are_refused():
    with pytest.raises(ValueError, match="4 ranks cannot share 3 heads of keys and values; try 3"):
        split(SMOLLM2, 0, 4, paired=True)
