"""Which message is legal next between the coordinator and one worker.

Both ends look up the same table, by the name of each message sent or received. Pure: no socket, no clock.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from ipc.table import Table

if TYPE_CHECKING:
    from ipc.messages import LaneName, Message


class LinkState(StrEnum):
    EXPECTED = "expected"
    """The worker was started and has not spoken yet."""
    GREETED = "greeted"
    STARTING = "starting"
    LOADED = "loaded"
    """Waits for its turn to profile."""
    PROFILING = "profiling"
    PROFILED = "profiled"
    """Waits to hear how many tokens it is to hold."""
    PREPARING = "preparing"
    IDLE = "idle"
    BUSY = "busy"
    """One Draft or Verify is in flight; never two."""
    STOPPING = "stopping"
    FAILED = "failed"


_S = LinkState
_ASK_AND_ANSWER = {"target": ("Verify", "Verified"), "speculator": ("Draft", "Drafted")}


def link_table(lane: LaneName) -> Table[LinkState, str]:
    """The table of a lane: a target is only asked to verify, a speculator only to draft."""
    ask, answer = _ASK_AND_ANSWER[lane]
    rows = {
        (_S.EXPECTED, "Greeted"): _S.GREETED,
        (_S.GREETED, "Configure"): _S.STARTING,
        (_S.STARTING, "Loaded"): _S.LOADED,
        (_S.LOADED, "Profile"): _S.PROFILING,
        (_S.PROFILING, "Profiled"): _S.PROFILED,
        (_S.PROFILED, "Allocate"): _S.PREPARING,
        (_S.PREPARING, "Ready"): _S.IDLE,
        (_S.IDLE, ask): _S.BUSY,
        (_S.BUSY, answer): _S.IDLE,
        (_S.STOPPING, "Stop"): _S.STOPPING,
    }
    if lane == "speculator":  # a server of several executors speaks when it is spoken to
        rows[_S.EXPECTED, "Attach"] = _S.EXPECTED
    facts = "PhaseReached", "Loaded", "Exported", "Imported", "Profiled", "Ready", "Progressed", answer
    for fact in facts:
        rows[_S.STOPPING, fact] = _S.STOPPING
    for state in (_S.LOADED, _S.PROFILING, _S.PROFILED, _S.PREPARING, _S.IDLE, _S.BUSY):
        for message in ("Export", "Exported", "Import", "Imported", "Unmap"):
            rows[state, message] = state
    for state in (_S.STARTING, _S.PROFILING, _S.PREPARING):
        rows[state, "PhaseReached"] = state
    for state in (_S.IDLE, _S.BUSY):
        rows |= {(state, "Open"): state, (state, "Close"): state, (state, "Progressed"): state}
        if lane == "speculator":  # it may meet the answer on the way
            rows[state, "Cancel"] = state
    for state in set(_S) - {_S.STOPPING, _S.FAILED}:
        rows[state, "Stop"] = _S.STOPPING
    for state in set(_S) - {_S.FAILED}:
        rows[state, "Failed"] = _S.FAILED
    rows[_S.FAILED, "Stop"] = _S.FAILED
    return Table(f"link to the {lane}", rows)


class Link:
    """The state of one link; `passed` is called with each message, sent or received, in order."""

    def __init__(self, lane: LaneName) -> None:
        self._table = link_table(lane)
        self.state = LinkState.EXPECTED

    def passed(self, message: Message) -> None:
        """Raises ProtocolError, and stays where it is, if the message is not legal now."""
        self.state = self._table.step(self.state, type(message).__name__)
