"""How long a lane may be silent in what it does before it counts as hung."""

from __future__ import annotations

import re

import pytest

from executor.config import Timeouts
from executor.lane import Lane, LaneEvent
from executor.watchdog import IDLE_SECONDS, silent_too_long
from ipc.messages import LaneSpec

TIMEOUTS = Timeouts(load=60.0, draft=1.0, hang=7.0, verify=20.0)


def lane(name: str, *events: LaneEvent, in_flight: int | None = None) -> Lane:
    """Started at 100, asked at 200, heard at 300."""
    made = Lane(LaneSpec(name, "toy", "", "fp32", "cpu", 1, 4, 64))
    made.started_at, made.asked_at, made.heard_at, made.in_flight = 100.0, 200.0, 300.0, in_flight
    for event in events:
        made.step(event)
    return made


@pytest.mark.parametrize(
    ("its", "limit", "reason"),
    [
        (lane("target"), 160.0, "not ready in time, .*in phase .* after 60 s"),
        (lane("speculator"), 160.0, "not ready in time, .*in phase .* after 60 s"),
        (lane("target", LaneEvent.READY, in_flight=1), 220.0, "no verdict within 20 s"),
        (lane("speculator", LaneEvent.READY, in_flight=1), 207.0, "no draft within 7 s"),
        (lane("target", LaneEvent.READY), 300.0 + IDLE_SECONDS, f"idle and silent for {IDLE_SECONDS:g} s"),
        (
            lane("speculator", LaneEvent.READY),
            300.0 + IDLE_SECONDS,
            f"idle and silent for {IDLE_SECONDS:g} s",
        ),
    ],
)
def test_hung_only_beyond_the_limit_of_what_it_does(its, limit, reason):
    assert silent_too_long(its, TIMEOUTS, limit) is None
    assert re.fullmatch(reason, silent_too_long(its, TIMEOUTS, limit + 0.001))


@pytest.mark.parametrize("events", [[LaneEvent.STOP], [LaneEvent.CONDEMN], [LaneEvent.ENDED]])
@pytest.mark.parametrize("name", ["target", "speculator"])
def test_who_is_on_the_way_out_is_not_watched(name, events):
    its = lane(name, LaneEvent.READY, *events, in_flight=1)
    assert silent_too_long(its, TIMEOUTS, 1e9) is None
