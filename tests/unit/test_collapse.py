"""When acceptance counts as collapsed, and that a speculator is started again for it only once."""

from __future__ import annotations

from executor.collapse import Collapse


def notes(collapse: Collapse, epoch: str, rounds: int, drafted: int, accepted: int) -> list[bool]:
    return [collapse.note(epoch, drafted, accepted) for _ in range(rounds)]


def test_nothing_is_judged_before_the_window_is_full():
    collapse = Collapse(rounds=4, share=0.01)
    assert notes(collapse, "a", 3, 5, 0) == [False] * 3
    assert collapse.alarm == ""
    assert collapse.note("a", 5, 0)
    assert collapse.alarm == "acceptance collapsed: 0 of 20 drafted tokens were accepted"


def test_rounds_without_drafts_do_not_count():
    collapse = Collapse(rounds=2, share=0.01)
    assert notes(collapse, "a", 1, 5, 0) + notes(collapse, "a", 100, 0, 0) == [False] * 101
    assert collapse.note("a", 5, 0)


def test_the_share_itself_is_enough():
    collapse = Collapse(rounds=1, share=0.01)
    assert not collapse.note("a", 100, 1)
    assert collapse.alarm == ""
    assert collapse.note("a", 101, 1)


def test_one_as_useless_after_its_restart_is_left_alone_with_the_alarm_standing():
    collapse = Collapse(rounds=2, share=0.01)
    assert notes(collapse, "a", 2, 5, 0) == [False, True]
    assert notes(collapse, "b", 20, 5, 0) == [False] * 20
    assert collapse.alarm
    assert notes(collapse, "c", 20, 5, 0) == [False] * 20


def test_accepted_drafts_end_the_alarm_but_do_not_buy_another_restart():
    collapse = Collapse(rounds=2, share=0.01)
    notes(collapse, "a", 2, 5, 0)
    notes(collapse, "b", 1, 5, 5)
    assert collapse.alarm
    notes(collapse, "b", 1, 5, 0)
    assert collapse.alarm == ""
    assert notes(collapse, "b", 4, 5, 0) == [False] * 4
    assert collapse.alarm


def test_another_incarnation_starts_its_own_window():
    collapse = Collapse(rounds=3, share=0.01)
    assert notes(collapse, "a", 2, 5, 0) + notes(collapse, "b", 2, 5, 0) == [False] * 4
    assert collapse.note("b", 5, 0)
