"""What a user may expect: from the lanes' states, with the reason, and since when."""

from __future__ import annotations

import logging

import pytest

from executor.health import Health, HealthLog
from executor.lane import Lane, LaneEvent
from ipc.messages import LaneSpec

_E = LaneEvent


def lane(name: str, *events: LaneEvent, because: str = "") -> Lane:
    made = Lane(LaneSpec(name, "toy", "", "fp32", "cpu", 1, 4, 64))
    made.down_because = because
    for event in events:
        made.step(event)
    return made


SERVING = lane("target", _E.READY)
DRAFTING = lane("speculator", _E.READY)
DEAD = lane("speculator", _E.READY, _E.ENDED, because="killed by SIGKILL")


@pytest.mark.parametrize(
    ("lanes", "expected", "state", "reason"),
    [
        ([SERVING, DRAFTING], 2, "healthy", ""),
        ([SERVING], 1, "healthy", ""),
        ([SERVING, DEAD], 2, "degraded", "speculator lane down: killed by SIGKILL"),
        ([SERVING, lane("speculator")], 2, "degraded", "speculator lane starting"),
        (
            [SERVING, lane("speculator", _E.READY, _E.CONDEMN, because="no draft within 1 s")],
            2,
            "degraded",
            "speculator lane condemned: no draft within 1 s",
        ),
        ([lane("target"), DRAFTING], 2, "recovering", "target lane starting"),
        (
            [lane("target", _E.READY, _E.ENDED, because="killed by SIGSEGV"), DEAD],
            2,
            "recovering",
            "target lane down: killed by SIGSEGV",
        ),
    ],
)
def test_states(lanes, expected, state, reason):
    health = HealthLog()
    health.note(lanes, expected=expected, now=5.0)
    assert health.now == Health(state, reason, 5.0)


def test_an_alarm_makes_what_serves_degraded():
    health = HealthLog()
    health.note([SERVING, DRAFTING], expected=2, now=1.0, alarm="acceptance collapsed")
    assert health.now == Health("degraded", "acceptance collapsed", 1.0)


def test_since_is_when_the_state_began_and_each_change_is_one_line(caplog):
    caplog.set_level(logging.INFO, logger="speclane")
    health = HealthLog()
    assert health.now == Health("starting", "", 0.0)
    for now, lanes in enumerate([[SERVING, DRAFTING], [SERVING, DRAFTING], [SERVING, DEAD], [SERVING, DEAD]]):
        health.note(lanes, expected=2, now=float(now))
    assert health.now.since == 2.0
    health.end("the executor was closed", 9.0)
    assert health.now == Health("failed", "the executor was closed", 9.0)
    changes = [record.getMessage().split()[1:3] for record in caplog.records]
    assert changes == [
        ["before=starting", "now=healthy"],
        ["before=healthy", "now=degraded"],
        ["before=degraded", "now=failed"],
    ]
