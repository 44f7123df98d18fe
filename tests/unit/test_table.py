"""Tables of transitions: the lane's, and what a missing row says."""

from __future__ import annotations

import pytest

from executor.lane import LANE_TABLE, Lane, LaneEvent, LaneState
from ipc.errors import ProtocolError
from ipc.link import LinkState
from ipc.messages import LaneSpec
from ipc.table import Table

SPEC = LaneSpec("speculator", "ngram", "", "fp32", "cpu", 1, 4, 64)
_S, _E = LaneState, LaneEvent

LEGAL = {
    _S.STARTING: {
        _E.READY: _S.SERVING,
        _E.STOP: _S.STOPPING,
        _E.CONDEMN: _S.CONDEMNED,
        _E.ENDED: _S.DOWN,
    },
    _S.SERVING: {_E.STOP: _S.STOPPING, _E.CONDEMN: _S.CONDEMNED, _E.ENDED: _S.DOWN},
    _S.STOPPING: {_E.STOP: _S.STOPPING, _E.CONDEMN: _S.STOPPING, _E.ENDED: _S.DOWN},
    _S.CONDEMNED: {_E.STOP: _S.CONDEMNED, _E.CONDEMN: _S.CONDEMNED, _E.ENDED: _S.DOWN},
    _S.DOWN: {},
}


def test_a_missing_row_names_machine_state_and_event():
    table = Table("door", {("open", "close"): "closed"})
    assert table.step("open", "close") == "closed"
    with pytest.raises(ProtocolError, match="door: close is not legal in state closed"):
        table.step("closed", "close")


@pytest.mark.parametrize("state", list(LaneState))
@pytest.mark.parametrize("event", list(LaneEvent))
def test_every_pair_of_lane_state_and_event(state, event):
    if event in LEGAL[state]:
        assert LANE_TABLE.step(state, event) is LEGAL[state][event]
    else:
        with pytest.raises(ProtocolError, match=f"lane: {event} is not legal in state {state}"):
            LANE_TABLE.step(state, event)


def test_a_lane_takes_orders_only_when_it_serves_and_nothing_is_in_flight():
    lane = Lane(SPEC)
    assert (lane.serving, lane.idle) == (False, False)
    lane.step(_E.READY)
    assert (lane.serving, lane.idle) == (True, False)  # its link has not got that far
    lane.link.state = LinkState.IDLE
    assert lane.idle
    lane.link.state = LinkState.BUSY
    assert not lane.idle


def test_every_lane_is_an_incarnation_of_its_own():
    lanes = [Lane(SPEC) for _ in range(100)]
    assert len({lane.epoch for lane in lanes}) == 100
    assert all(lane.identity == f"speculator/{lane.epoch}" for lane in lanes)
