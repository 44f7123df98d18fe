"""Prompt lookup against a search of the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages import LaneSpec, OpenedSequence, SamplingSpec
from workers.sequence import LaneSequence
from workers.speculator import Ask
from workers.speculators.ngram import MAX_MATCH, MIN_MATCH, NgramIndex, NgramSpeculator

SAMPLING = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)


def lookup(tokens: list[int], k: int) -> list[int]:
    """What follows the last earlier occurrence of the longest suffix, by brute force."""
    for length in range(min(MAX_MATCH, len(tokens)), MIN_MATCH - 1, -1):
        suffix = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == suffix:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


@pytest.mark.parametrize(
    ("tokens", "guess"),
    [
        ([], []),
        ([1], []),
        ([1, 2], []),
        ([1, 2, 1, 2], [1, 2, 1]),
        ([1, 2, 3, 9, 1, 2], [3, 9, 1]),
        ([1, 1, 1], [1, 1, 1]),
        ([1, 2, 7, 1, 2, 8, 1, 2], [8, 1, 2]),
        ([0, 1, 2, 7, 5, 1, 2, 8, 0, 1, 2], [7, 5, 1]),
        ([1, 2, 3], []),
    ],
)
def test_examples(tokens, guess):
    assert NgramIndex().propose(tokens, 3) == guess
    assert lookup(tokens, 3) == guess


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40), st.lists(st.integers(1, 6), max_size=10), st.integers(1, 8))
def test_a_growing_text_is_looked_up_as_brute_force_would(tokens, growth, k):
    index, length = NgramIndex(), 0
    for step in growth:
        length = min(len(tokens), length + step)
        assert index.propose(tokens[:length], k) == lookup(tokens[:length], k)


def test_sequences_do_not_see_each_other():
    speculator = NgramSpeculator(LaneSpec("speculator", "ngram", "", "fp32", "cpu", 1, 4, 64))
    texts = [[1, 2, 3, 1, 2], [1, 2]]
    sequences = [LaneSequence(OpenedSequence(i, 0, text, 1, SAMPLING)) for i, text in enumerate(texts)]
    for sequence in sequences:
        speculator.open(sequence)
    assert speculator.propose([Ask(sequences[0], 2), Ask(sequences[1], 2)]) == [[3, 1], []]
    speculator.close(sequences[0])
    assert speculator.propose([Ask(sequences[1], 2)]) == [[]]
    assert speculator.vocabulary.size == 0
    assert speculator.max_model_len == 64
