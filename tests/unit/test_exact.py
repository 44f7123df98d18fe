"""What the proof of shared layers cuts, and what it leaves whole: only what agrees on all ranks is cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_shards import SMOLLM2

from workers.engines.native.exact import Trial, prove
from workers.engines.native.shards import Cut, split, uncut
from workers.engines.native.weights import Matrix
from workers.linear import RowBuckets, half, plain

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS = RowBuckets((1, 2, 4, 8))
SMALL = replace(
    SMOLLM2, vocab_size=128, hidden_size=128, intermediate_size=192, query_heads=4, kv_heads=2, head_dim=32
)


class Ranks:
    """A group whose other ranks object to what `objects` says of the n-th question."""

    rank = 0
    size = 2

    def __init__(self, objects=lambda question, flags: flags) -> None:
        self._objects = objects
        self.questions = 0

    def agree(self, flags):
        self.questions += 1
        return self._objects(self.questions, list(flags))


def proved(group=None, make=plain, *, heads_agree: bool = True):
    shards = split(SMALL, 0, 2, paired=False)
    keys = shards.heads.times(SMALL.head_dim)

    def matrix(outputs: tuple[Cut, ...], inputs: int) -> Matrix:
        weight = torch.randn(sum(cut.size for cut in outputs), inputs, generator=torch.manual_seed(1))
        return Matrix(weight, None, outputs, uncut(inputs))

    samples = [
        matrix((keys.times(2), keys, keys), 128),
        matrix((shards.attended,), 128),
        matrix((shards.inner, shards.inner), 128),
        matrix((shards.down,), 192),
    ]
    head = matrix((shards.vocabulary,), 128)
    trials = Trial(make, ROWS), Trial(make, ROWS)
    return prove(group or Ranks(), shards, samples, head, trials, heads_agree=heads_agree)


def test_all_is_cut_where_all_agree():
    found = proved()
    assert found.shards == split(SMALL, 0, 2, paired=False)
    assert found.shards.uncut == []
    assert (found.rows, found.head_rows) == (ROWS, ROWS)


def test_row_counts_at_which_a_part_differs_are_not_used():
    def differs(weight, bias, keep=None):
        whole = plain(weight, bias, keep)
        return lambda x: whole(x) + (keep is not None and len(x) == 4)

    found = proved(make=differs)
    assert found.shards.uncut == []
    assert found.rows == found.head_rows == RowBuckets((1, 2, 8))


def test_a_matrix_whose_parts_always_differ_is_left_whole():
    def differs(weight, bias, keep=None):
        whole = plain(weight, bias, keep)
        return lambda x: whole(x) + (keep is not None and weight.shape[1] == 192)

    found = proved(make=differs)
    assert found.shards.uncut == ["its output layer"]
    assert found.rows == ROWS


@pytest.mark.parametrize(
    ("question", "name"),
    [(2, "attention"), (3, "its output"), (4, "the network"), (5, "its output layer"), (6, "the vocabulary")],
)
def test_the_objection_of_another_rank_counts(question, name):
    group = Ranks(lambda asked, flags: [False] * len(flags) if asked == question else flags)
    assert proved(group).shards.uncut == [name]
    assert group.questions == 6


def test_heads_that_differ_alone_are_left_whole():
    found = proved(heads_agree=False)
    assert found.shards.uncut == ["attention"]
    assert found.shards.config(SMALL) == SMALL


def test_a_part_is_scaled_as_the_whole_is():
    """bfloat16 weights beyond float16's range: what is lost of the small ones hangs on the largest of all."""
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(64, 32, generator=generator).bfloat16()
    weight[:32] *= 2.0**-22
    weight[32:] *= 2.0**9
    x, keep = torch.randn(3, 32, generator=generator), torch.arange(32)
    part = half(weight, None, keep)(x)
    assert torch.equal(part, half(weight, None)(x)[:, :32])
    assert not torch.equal(part, half(weight[:32], None)(x))
