"""Verification capacity: within the budget, the guesses that are likeliest to be of use."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.plan import draft_budget
from workers.worth import UNKNOWN, capacities

CHANCES = st.lists(st.floats(0, 1), max_size=3)


@settings(derandomize=True, deadline=None)
@given(st.lists(CHANCES, max_size=4), st.integers(0, 12))
def test_no_other_choice_within_the_budget_is_worth_more(confidences, budget):
    def worth(choice) -> float:
        """Expected number of guesses that stand."""
        return sum(
            math.prod(chances[: place + 1])
            for chances, count in zip(confidences, choice, strict=True)
            for place in range(count)
        )

    lengths = [len(chances) for chances in confidences]
    chosen = capacities(lengths, confidences, budget)
    assert sum(chosen) == min(budget, sum(lengths))
    assert all(0 <= count <= length for count, length in zip(chosen, lengths, strict=True))
    choices = itertools.product(*(range(length + 1) for length in lengths))
    best = max(worth(choice) for choice in choices if sum(choice) <= budget)
    assert worth(chosen) == pytest.approx(best)


def test_guesses_of_which_nothing_is_known_are_spread_evenly():
    assert capacities([4, 4, 1], [[], [], []], 6) == [3, 2, 1]
    assert capacities([3, 3], [[UNKNOWN], [0.9]], 3) == [1, 2]


def test_confidences_may_be_beyond_all_bounds():
    assert capacities([2, 2], [[7.0, -1.0], [0.5, 0.5]], 3) == [1, 2]


@pytest.mark.parametrize(("sequences", "tokens", "budget"), [(3, 8, 5), (3, 2, 0), (3, 0, None), (0, 8, 8)])
def test_each_sequence_runs_one_token_in_any_case(sequences, tokens, budget):
    assert draft_budget([None] * sequences, tokens) == budget  # type: ignore[list-item]
