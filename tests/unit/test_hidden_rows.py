"""Hidden rows on their way from target to speculator: what is kept, what is asked for, what is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from letters import request
from msgspec import structs

from executor import dialogue
from executor.hidden_rows import KeptRows
from executor.lane import Lane
from executor.leases import Leases
from executor.verifying import _rows_since, _sound
from ipc.messages import HeadSpec, HiddenRows, LaneSpec, VerifyItem
from workers.engines.tap import Tap

WINDOW = 8
LEASES = Leases(10.0)
HEAD = HeadSpec("head", (1,), row_bytes=2, window=WINDOW)


def part(start: int, count: int) -> HiddenRows:
    return HiddenRows(
        start, count, b"".join(bytes([position, position]) for position in range(start, start + count))
    )


def positions(parts: list[HiddenRows]) -> list[int]:
    assert all(part == globals()["part"](part.start, part.count) for part in parts)
    return [position for part in parts for position in range(part.start, part.start + part.count)]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=20))
def test_the_latest_positions_are_kept_without_a_gap(steps):
    kept, expected, end = KeptRows(), [], 0
    for gap, count in steps:
        if gap and end:
            expected = []
        start = end + (gap if end else 0)
        kept.add([part(start, count)], HEAD, LEASES)
        end = start + count
        expected += range(start, end)
        assert kept.end == end
        held = positions(kept.since(0, HEAD))
        assert held == expected[len(expected) - len(held) :]
        assert len(held) >= min(len(expected), WINDOW)
        assert len(held) < WINDOW + 5
        assert all(p >= end - count for p in positions(kept.since(end - count, HEAD)))


@pytest.mark.parametrize(
    ("length", "draft", "room", "expected"),
    [
        (5, 2, 1000, 0),  # the whole prompt
        (20, 2, 1000, 12),  # the latest window
        (20, 2, 19, None),  # ten rows of two bytes do not fit
        (20, 2, 20, 12),
    ],
)
def test_rows_are_asked_for_that_are_of_use_and_fit(length, draft, room, expected):
    asked = request(list(range(length)))
    assert _rows_since(asked, [1] * draft, HEAD, room) == expected
    assert _rows_since(asked, [1] * draft, None, room) is None


def test_only_news_are_asked_for():
    asked = request(list(range(20)))
    asked.rows.add([part(10, 9)], HEAD, LEASES)
    assert _rows_since(asked, [1, 2], HEAD, 1000) == 19


END = 11
"""Ten tokens are committed, and one of the draft was accepted."""


@pytest.mark.parametrize(
    ("rows", "believed"),
    [
        ([], True),
        ([part(9, 2)], True),
        ([part(9, 1), part(10, 1)], True),
        ([part(10, 1)], True),
        ([part(8, 3)], False),  # not asked for
        ([part(9, 3)], False),  # of a token that was refused
        ([part(10, 1), part(9, 1)], False),
        ([HiddenRows(9, 2, b"abc")], False),
    ],
)
def test_rows_that_cannot_be_are_not_believed(rows, believed):
    asked = VerifyItem(0, 0, base_len=10, since=[1], draft=[1, 2], rows_since=9)
    assert _sound(asked, rows, END, HEAD) is believed


def test_rows_that_nobody_asked_for_are_not_believed():
    asked = VerifyItem(0, 0, base_len=10, since=[1], draft=[1, 2])
    assert _sound(asked, [], END, None)
    assert not _sound(asked, [part(9, 2)], END, None)
    assert not _sound(asked, [part(9, 2)], END, HEAD)


class NoTransport:
    leases = LEASES

    @staticmethod
    def reaches(lane: Lane, arena: str) -> bool:
        return False


class LANES:
    transport = NoTransport

    @staticmethod
    def now() -> float:
        return 0.0


def lane(head: HeadSpec | None) -> Lane:
    return Lane(LaneSpec("speculator", "eagle", "", "fp32", "cpu", 1, 4, 64, head=head))


def test_a_lane_is_handed_each_row_once_and_a_new_one_all_that_are_kept():
    asked = request(list(range(20)))
    asked.rows.add([part(0, 6)], HEAD, LEASES)
    first = lane(HEAD)
    assert positions(dialogue.rows(LANES, first, asked, 1000)) == list(range(6))
    assert dialogue.rows(LANES, first, asked, 1000) == []
    asked.rows.add([part(6, 2)], HEAD, LEASES)
    assert dialogue.rows(LANES, first, asked, room=3) == []  # later
    assert positions(dialogue.rows(LANES, first, asked, room=4)) == [6, 7]
    assert positions(dialogue.rows(LANES, lane(HEAD), asked, 1000)) == list(range(8))
    assert dialogue.rows(LANES, lane(None), asked, 1000) == []


def test_rows_for_another_head_are_made_anew():
    """Which reads other layers, so that it could not even tell."""
    asked, other = request(list(range(20))), structs.replace(HEAD, taps=(2,))
    asked.rows.add([part(10, 9)], HEAD, LEASES)
    assert asked.rows.since(0, other) == []
    assert dialogue.rows(LANES, lane(other), asked, 1000) == []
    asked.rows.fit(HEAD, LEASES)
    assert asked.rows.end == 19
    asked.rows.fit(other, LEASES)
    assert _rows_since(asked, [1, 2], other, 1000) == 12
    asked.rows.add([part(12, 7)], other, LEASES)
    assert asked.rows.since(0, HEAD) == []
    assert positions(asked.rows.since(0, other)) == list(range(12, 19))


def pack(start: int, rows: list[int]) -> HiddenRows:
    return HiddenRows(start, len(rows), bytes(byte for position in rows for byte in (position, position)))


def test_a_tap_keeps_what_is_wanted_and_shows_what_stands():
    tap = Tap((1, 2), {7: 4}, pack)
    assert list(tap.wanted(7, 0, 4)) == []
    assert list(tap.wanted(7, 2, 4)) == [2, 3]
    assert list(tap.wanted(7, 6, 2)) == [0, 1]
    assert list(tap.wanted(8, 0, 4)) == []
    tap.keep(7, 4, [4, 5])
    tap.keep(7, 6, [6, 7, 8])
    assert tap.rows(7, 8) == [part(4, 2), part(6, 2)]
    assert tap.rows(7, 5) == [part(4, 1)]
    assert tap.rows(7, 4) == []
    assert tap.rows(8, 9) == []
