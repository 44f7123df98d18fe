"""Whether a lane hangs: how long it may be silent in what it does. Pure; times are of one monotonic clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.lane import LaneState

if TYPE_CHECKING:
    from executor.config import Timeouts
    from executor.lane import Lane

IDLE_SECONDS = 5.0
"""An idle worker says every second that its loop turns."""
BOOT_SECONDS = 60.0
"""From its start to its first word a worker imports little, and loads nothing."""


def silent_too_long(lane: Lane, timeouts: Timeouts, now: float) -> str | None:
    """Why the lane counts as hung, or None."""
    if lane.state is LaneState.STARTING:
        boots = lane.phase == "start" and lane.spec.engine != "remote"  # a server may have to come back first
        limit = min(BOOT_SECONDS, timeouts.load) if boots else timeouts.load
        if now - lane.started_at > limit:
            return f"not ready in time, in phase {lane.phase} after {limit:g} s"
    elif lane.state is LaneState.SERVING:
        if lane.in_flight is not None:
            limit, what = (timeouts.verify, "verdict") if lane.name == "target" else (timeouts.hang, "draft")
            if now - lane.asked_at > limit:
                return f"no {what} within {limit:g} s"
        elif now - lane.heard_at > IDLE_SECONDS:
            return f"idle and silent for {IDLE_SECONDS:g} s"
    return None
