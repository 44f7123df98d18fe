"""A lane's sequences: the engine sees every token once, and nothing that was taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.errors import ProtocolError
from ipc.messages import OpenedSequence, SamplingSpec
from workers.engines.engine import Window
from workers.lane import SequenceTable
from workers.sequence import LaneSequence

SAMPLING = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)
TOKEN = st.integers(0, 3)


def opened(tokens: list[int], seq: int = 0, gen: int = 0) -> OpenedSequence:
    return OpenedSequence(seq, gen, tokens, len(tokens), SAMPLING)


def test_the_first_window_is_the_whole_prompt():
    assert LaneSequence(opened([5, 6, 7])).window([], rows=1) == Window(0, 0, [5, 6, 7], 1)


def test_what_the_engine_has_from_elsewhere_is_not_run():
    sequence = LaneSequence(opened([5, 6, 7, 8]))
    sequence.hold(2)
    assert sequence.window([], rows=1) == Window(0, 2, [7, 8], 1)


def test_a_long_history_is_run_in_parts_and_gives_its_rows_with_the_last():
    sequence = LaneSequence(opened([1, 2, 3, 4, 5, 6]))
    windows = [sequence.window([7], rows=2, room=2) for _ in range(4)]
    assert windows == [
        Window(0, 0, [1, 2], 0),
        Window(0, 2, [3, 4], 0),
        Window(0, 4, [5, 6, 7], 2),
        Window(0, 5, [6, 7], 2),
    ]


def test_accepted_drafts_are_not_run_again():
    sequence = LaneSequence(opened([5, 6]))
    assert sequence.window([1, 2, 3], rows=4) == Window(0, 0, [5, 6, 1, 2, 3], 4)
    sequence.advance(5, [1, 2, 9])  # two accepted, then the target's own token
    assert sequence.window([4], rows=2) == Window(0, 4, [9, 4], 2)


def test_a_rejected_draft_is_run_over():
    sequence = LaneSequence(opened([5]))
    sequence.window([1, 2], rows=3)
    sequence.advance(2, [8])
    assert sequence.window([], rows=1) == Window(0, 1, [8], 1)


def test_the_wanted_rows_are_run_even_if_cached():
    sequence = LaneSequence(opened([5, 6, 7]))
    sequence.window([], rows=1)
    assert sequence.window([], rows=1) == Window(0, 2, [7], 1)
    assert sequence.window([], rows=2) == Window(0, 1, [6, 7], 2)


@pytest.mark.parametrize(("base_len", "since"), [(5, [1]), (1, [1, 2]), (0, []), (4, []), (-1, [])], ids=repr)
def test_a_history_with_a_hole_is_refused(base_len, since):
    sequence = LaneSequence(opened([5, 6, 7]))
    with pytest.raises(ProtocolError, match=f"sequence 0: base_len {base_len}"):
        sequence.advance(base_len, since)
    assert sequence.tokens == [5, 6, 7]


@settings(max_examples=150, derandomize=True, deadline=None)
@given(st.lists(TOKEN, min_size=1, max_size=5), st.data())
def test_the_engine_always_holds_the_history_and_runs_no_accepted_draft_again(prompt, data):
    """A plain engine follows the windows; tokens are from a few, so that drafts are often right."""
    sequence = LaneSequence(opened(prompt))
    history, held = list(prompt), []
    for _ in range(data.draw(st.integers(1, 8))):
        rows_of_draft = data.draw(st.booleans())  # the target wants all rows, a speculator the last
        wanted = data.draw(st.lists(TOKEN, max_size=4))
        rows = len(wanted) + 1 if rows_of_draft else 1
        room = data.draw(st.one_of(st.none(), st.integers(0, 4)))
        _, start, run, given = sequence.window(wanted, rows, room)
        full = history + wanted
        shorter = min(len(held), len(full))
        agreeing = next((i for i, (a, b) in enumerate(zip(held, full, strict=False)) if a != b), shorter)
        assert start == min(agreeing, len(full) - rows)
        held[start:] = run
        missing = len(full) - rows - start
        if room is None or missing <= room:
            assert (held, given) == (full, rows)
        else:
            assert (held, given) == (full[: start + room], 0)

        rollback = data.draw(st.integers(0, min(2, len(history) - 1)))
        since = data.draw(st.one_of(st.just(wanted), st.lists(TOKEN, min_size=1, max_size=3)))
        keep = len(history) - rollback
        history = history[:keep] + since
        sequence.advance(len(history), since)
        assert sequence.tokens == history


class TestSequenceTable:
    def test_open_advance_close(self):
        table = SequenceTable(None)
        sequence = table.open(opened([1, 2], seq=7, gen=3))
        assert table.advance(7, 3, 3, [9]) is sequence
        assert sequence.tokens == [1, 2, 9]
        assert table.close(7) is sequence

    def test_what_does_not_fit_is_refused(self):
        table = SequenceTable(None)
        table.open(opened([1], seq=7, gen=3))
        with pytest.raises(ProtocolError, match="sequence 7 is open already"):
            table.open(opened([1], seq=7))
        with pytest.raises(ProtocolError, match="sequence 8 has no tokens"):
            table.open(opened([], seq=8))
        with pytest.raises(ProtocolError, match="sequence 7 of generation 2 is of generation 3"):
            table.advance(7, 2, 1, [])
        with pytest.raises(ProtocolError, match="sequence 9 of generation 0 is not open"):
            table.advance(9, 0, 1, [])
        with pytest.raises(ProtocolError, match="sequence 9 is not open"):
            table.close(9)
