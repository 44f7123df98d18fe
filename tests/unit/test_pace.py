"""How long to wait for drafts, from how long they took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.pace import DraftPace, work

LEAST, MOST = 0.01, 10.0
SECONDS = st.floats(0.0, 1e4)
WORK = st.floats(0.1, 1e4)


def test_nothing_known():
    assert DraftPace(LEAST, MOST).patience(5) == MOST


def test_the_most_counts_if_the_bounds_contradict():
    assert DraftPace(least=2.0, most=1.0).patience(5) == 1.0


def test_steady_drafts_may_take_twice_their_time():
    pace = DraftPace(LEAST, MOST)
    for _ in range(200):
        pace.note(5, 0.5)
    assert pace.patience(5) == pytest.approx(1.0, rel=0.01)
    assert pace.patience(10) == pytest.approx(2.0, rel=0.01)
    assert pace.patience(0.001) == LEAST


def test_the_first_answer_by_hand():
    pace = DraftPace(LEAST, MOST)
    pace.note(2, 0.2)  # mean 0.1, deviation 0.05 a token
    assert pace.patience(2) == pytest.approx(2 * (2 * 0.1 + 4 * 0.05))
    pace.note(2, 0.4)  # deviation 0.05 + (0.1 - 0.05) / 4, mean 0.1 + 0.1 / 8
    assert pace.patience(1) == pytest.approx(2 * 0.1125 + 4 * 0.0625)


def test_unsteady_drafts_get_more():
    steady, unsteady = DraftPace(LEAST, MOST), DraftPace(LEAST, MOST)
    for turn in range(100):
        steady.note(1, 0.2)
        unsteady.note(1, 0.1 if turn % 2 else 0.3)
    assert unsteady.patience(1) > 1.5 * steady.patience(1)


def test_a_pause_is_forgotten_and_a_lasting_change_learned():
    pace = DraftPace(LEAST, MOST)
    for _ in range(100):
        pace.note(1, 0.1)
    pace.note(1, 1000.0)
    assert pace.patience(1) < 1.0
    rounds = 0
    while pace.patience(1) < 2.0:
        pace.note(1, 2.0)
        rounds += 1
    assert rounds < 12


def test_work():
    assert work(k=5, news=0) == 5
    assert work(k=5, news=16) == 7


@given(st.lists(st.tuples(WORK, SECONDS), max_size=30), WORK)
def test_always_within_the_bounds(notes, asked):
    pace = DraftPace(LEAST, MOST)
    for amount, seconds in notes:
        pace.note(amount, seconds)
    assert LEAST <= pace.patience(asked) <= MOST
