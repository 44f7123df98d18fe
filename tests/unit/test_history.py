"""The ring of tokens against a search of the whole text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.speculators.history import CONTEXTS, MAX_MATCH, MAX_PLACES, SEPARATOR, Guess, History


def searched(text: list[int], context: list[int]) -> list[tuple[int, int]]:
    """Length and following place of the longest of the latest matches, by brute force."""
    for size in CONTEXTS:
        if len(context) < size:
            continue
        found = []
        for place in range(len(text) - 1, size - 1, -1):
            length = 0
            while length < min(MAX_MATCH, len(context), place):
                if text[place - 1 - length] != context[-1 - length]:
                    break
                length += 1
            if length >= size:
                found.append((length, place))
        if found := found[:MAX_PLACES]:
            return [match for match in found if match[0] == max(found)[0]]
    return []


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 30))
def test_places_are_those_that_a_search_finds(text, cut):
    history = History(1 << 14)
    history.extend(text[:cut])
    history.extend(text[cut:])
    assert history.places(text) == searched(text, text)
    assert history.places([1, *text[-3:]]) == searched(text, [1, *text[-3:]])


def path(history: History, context: list[int], k: int) -> list[int]:
    walk, tokens = history.walk(context), []
    while len(tokens) < k and (guess := walk.guess()) is not None:
        tokens.append(guess.token)
        walk.go(guess.token)
    return tokens


@pytest.mark.parametrize(
    ("text", "context", "expected"),
    [
        ([], [1, 2], []),
        ([1, 2, 3, 4, 5, 6], [9, 1, 2], [3, 4, 5, 6]),
        ([1, 2, 3, 1, 2, 3, 1, 2, 9], [7, 1, 2], [3, 1, 2, 9]),  # the most frequent, then the latest
        ([5, 1, 2, 3, 6, 1, 2, 4], [6, 1, 2], [4]),  # the longer match
        ([8, 1, 2, 3, 7, 1, 2, 4], [9, 1, 2], [4]),  # the latest of those that are tied
        ([1, 2, 3, SEPARATOR, 4, 5], [1, 2], [3]),  # not into the next text
        ([1, 2, SEPARATOR, 4, 5], [1, 2], []),
    ],
)
def test_paths(text, context, expected):
    history = History(1024)
    history.extend(text)
    assert path(history, context, 4) == expected


def test_a_repeating_text_goes_on_in_its_own_guesses():
    history = History(1024)
    text = [1, 2, 3, 1, 2, 3, 1, 2, 3]
    history.extend(text)
    assert path(history, text, 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_guess_tells_its_evidence():
    history = History(1024)
    history.extend([9, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 4, SEPARATOR])
    assert history.walk([6, 1, 2]).guess() == Guess(token=3, length=2, votes=2, places=3)


def test_what_is_said_need_not_be_what_was_guessed():
    history = History(1024)
    history.extend([1, 2, 3, 4, SEPARATOR, 1, 2, 5, 6, SEPARATOR, 1, 2, 5, 6])
    walk = history.walk([1, 2])
    assert walk.guess().token == 5
    walk.go(3)
    assert walk.guess() == Guess(token=4, length=3, votes=1, places=1)


def test_the_oldest_is_forgotten_and_memory_stays():
    history = History(64)
    history.extend([1000, 1001, 1002])
    size = history.nbytes
    assert path(history, [1000, 1001], 1) == [1002]
    history.extend(range(64))
    assert path(history, [1000, 1001], 1) == []
    assert path(history, [60, 61], 2) == [62, 63]
    assert history.nbytes == size
    assert len(history) == 64


def test_lookups_stay_flat_and_memory_bounded_under_a_long_load():
    """As many tokens as an hour of 300 a second brings, in texts that repeat themselves a lot."""
    history = History(1 << 14)
    size = history.nbytes

    def seconds() -> float:
        times = []
        for start in range(200):
            context = [start % 50, (start + 1) % 50, (start + 2) % 50]
            began = time.perf_counter()
            path(history, context, 7)
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    history.extend([i % 50 for i in range(2000)])
    early = seconds()
    for text in range(150):
        history.extend([(text * 7 + i * i) % 50 if i % 3 else i % 50 for i in range(1000)])
    history.extend([i % 50 for i in range(2000)])
    assert seconds() < 5 * early
    assert history.nbytes == size
    assert len(history) == 1 << 14
