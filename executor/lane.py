"""One lane as the coordinator sees it: its state, what is in flight, and what it has been told."""

from __future__ import annotations

import time
import uuid
from enum import StrEnum
from typing import TYPE_CHECKING

from ipc.link import Link, LinkState
from ipc.table import Table

if TYPE_CHECKING:
    from executor.process import WorkerProcess
    from ipc.messages import Drafted, LaneName, LaneSpec, Ready, Verified


class LaneState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    DOWN = "down"


class LaneEvent(StrEnum):
    READY = "ready"
    STOP = "stop"
    ENDED = "ended"


LANE_TABLE: Table[LaneState, LaneEvent] = Table(
    "lane",
    {
        (LaneState.STARTING, LaneEvent.READY): LaneState.SERVING,
        (LaneState.STARTING, LaneEvent.STOP): LaneState.STOPPING,
        (LaneState.STARTING, LaneEvent.ENDED): LaneState.DOWN,
        (LaneState.SERVING, LaneEvent.STOP): LaneState.STOPPING,
        (LaneState.SERVING, LaneEvent.ENDED): LaneState.DOWN,
        (LaneState.STOPPING, LaneEvent.STOP): LaneState.STOPPING,
        (LaneState.STOPPING, LaneEvent.ENDED): LaneState.DOWN,
    },
)


class Lane:
    """Holds no decision: the shell around it (executor.lanes) moves it, the coordinator reads it."""

    def __init__(self, spec: LaneSpec) -> None:
        self.spec = spec
        self.name: LaneName = spec.lane
        self.epoch = uuid.uuid4().hex[:12]
        self.identity = f"{self.name}/{self.epoch}"
        self.state = LaneState.STARTING
        self.link = Link(self.name)
        self.process: WorkerProcess | None = None
        self.phase = "boot"
        self.ready: Ready | None = None
        self.reply: Drafted | Verified | None = None
        self.in_flight: int | None = None
        self.abandoned = False
        """The order in flight missed its deadline: its reply, if it ever comes, is stale."""
        self.down_because = ""
        self.stderr_tail = ""
        self.told: dict[int, int] = {}
        """Per open sequence, how many committed tokens the lane knows."""
        self.busy_ns = 0
        self.orders = 0
        self.asked_at = 0.0

    @property
    def serving(self) -> bool:
        return self.state is LaneState.SERVING

    @property
    def idle(self) -> bool:
        """Takes an order now."""
        return self.serving and self.link.state is LinkState.IDLE

    def overdue(self, seconds: float) -> bool:
        """Whether the order in flight was sent so long ago."""
        return self.in_flight is not None and time.monotonic() - self.asked_at > seconds

    def step(self, event: LaneEvent) -> None:
        self.state = LANE_TABLE.step(self.state, event)
