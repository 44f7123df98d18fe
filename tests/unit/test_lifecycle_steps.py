"""The steps of a lane's start: one table, in order, each reported once with its time."""

from __future__ import annotations

from typing import get_args

import pytest

from ipc.errors import ProtocolError
from ipc.messages import Phase
from workers import lifecycle
from workers.lifecycle import START, Lifecycle

PHASES = get_args(Phase)


def test_the_table_is_one_line_of_steps():
    assert START.rows == {
        ("born", "boot"): "boot",
        ("boot", "load"): "load",
        ("load", "attention_setup"): "attention_setup",
        ("attention_setup", "profile"): "profile",
        ("profile", "capacity"): "capacity",
        ("capacity", "allocate"): "allocate",
        ("allocate", "warm_up"): "warm_up",
        ("warm_up", "capture"): "capture",
        ("capture", "lock"): "lock",
        ("lock", "serve"): "serve",
    }


def test_each_step_is_reported_with_its_time_and_outcome(monkeypatch):
    now = iter(range(100, 200))
    monkeypatch.setattr(lifecycle.time, "monotonic", lambda: float(next(now)))
    reports = []
    start = Lifecycle(lambda *report: reports.append(report), 98.5)
    for phase in PHASES:
        with start.step(phase) as outcome:
            outcome += ["none"] if phase == "capture" else []
    assert reports[:2] == [("boot", 1.5, ""), ("load", 1.0, "")]
    assert next(now) == 100 + 2 * len(PHASES) - 1  # time between two steps is nobody's
    assert [phase for phase, *_ in reports] == list(PHASES)
    assert ("capture", 1.0, "none") in reports


@pytest.mark.parametrize("done", range(len(PHASES)))
def test_no_step_is_left_out_or_repeated(done):
    start = Lifecycle(lambda *report: None, 0.0)
    for phase in PHASES[:done]:
        with start.step(phase):
            pass
    before = start.phase
    for phase in set(PHASES) - {PHASES[done]}:
        refused = pytest.raises(ProtocolError, match=f"{phase} is not legal in state {before}")
        with refused, start.step(phase):
            raise AssertionError("it was taken")
        assert start.phase == before


def test_a_step_that_fails_is_not_done():
    reports = []
    start = Lifecycle(lambda *report: reports.append(report), 0.0)
    with pytest.raises(MemoryError), start.step("boot"):
        raise MemoryError
    assert (start.phase, reports) == ("born", [])
