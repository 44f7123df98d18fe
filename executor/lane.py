"""One incarnation of a lane as the coordinator sees it: its state, what is in flight, and what it was told.

A lane that is started again is a new object with a new epoch: nothing of the old one can pass for its own.
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import TYPE_CHECKING

from ipc.link import Link, LinkState
from ipc.table import Table

if TYPE_CHECKING:
    from executor.admission import KvRoom
    from executor.worker import Worker
    from ipc.messages import (
        Drafted,
        HeadSpec,
        LaneEngine,
        LaneName,
        LaneSpec,
        MemoryProfile,
        Offer,
        Ready,
        Verified,
    )


class LaneState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    """Was told to stop; its end is no accident."""
    CONDEMNED = "condemned"
    """Hangs, and is being ended: a dump of where it is, SIGABRT, SIGKILL."""
    DOWN = "down"


class LaneEvent(StrEnum):
    READY = "ready"
    STOP = "stop"
    CONDEMN = "condemn"
    ENDED = "ended"


_S, _E = LaneState, LaneEvent

LANE_TABLE: Table[LaneState, LaneEvent] = Table(
    "lane",
    {
        (_S.STARTING, _E.READY): _S.SERVING,
        (_S.STARTING, _E.STOP): _S.STOPPING,
        (_S.STARTING, _E.CONDEMN): _S.CONDEMNED,
        (_S.STARTING, _E.ENDED): _S.DOWN,
        (_S.SERVING, _E.STOP): _S.STOPPING,
        (_S.SERVING, _E.CONDEMN): _S.CONDEMNED,
        (_S.SERVING, _E.ENDED): _S.DOWN,
        (_S.STOPPING, _E.STOP): _S.STOPPING,
        (_S.STOPPING, _E.CONDEMN): _S.STOPPING,
        (_S.STOPPING, _E.ENDED): _S.DOWN,
        (_S.CONDEMNED, _E.STOP): _S.CONDEMNED,
        (_S.CONDEMNED, _E.CONDEMN): _S.CONDEMNED,
        (_S.CONDEMNED, _E.ENDED): _S.DOWN,
    },
)


class Lane:
    """Holds no decision: the supervisor moves it, the coordinator reads it. Times are of time.monotonic."""

    def __init__(self, spec: LaneSpec) -> None:
        self.spec = spec
        self.name: LaneName = spec.lane
        self.epoch = uuid.uuid4().hex[:12]
        self.identity = f"{self.name}/{self.epoch}"
        self.state = LaneState.STARTING
        self.link = Link(self.name)
        self.process: Worker | None = None
        self.pids: tuple[int, ...] = ()
        self.phase = "start"
        self.device_ids: tuple[str, ...] = ()
        """The devices that its ranks run on, once it has loaded."""
        self.profiles: tuple[MemoryProfile, ...] = ()
        """Of each rank, once it has profiled."""
        self.serves: Offer | None = None
        """What drafts, where only a server knows that."""
        self.room: KvRoom | None = None
        """What it holds, once that is planned."""
        self.ready: Ready | None = None
        self.reply: Drafted | Verified | None = None
        self.in_flight: int | None = None
        self.down_because = ""
        self.stderr_tail = ""
        self.refused = False
        """It said that what it was told to become cannot be: starting it again would not help."""
        self.told: dict[int, int] = {}
        """Per open sequence, how many committed tokens the lane knows."""
        self.held: dict[int, int] = {}
        """Per sequence whose history it has not run yet, how much of that it had the last time."""
        self.reused = 0
        """Tokens whose keys and values it found instead of computing them."""
        self.told_rows: dict[int, int] = {}
        """Per open sequence, up to which position the lane was handed hidden rows."""
        self.busy_ns = 0
        self.orders = 0
        self.started_at = 0.0
        self.ready_at = 0.0
        self.asked_at = 0.0
        self.answered_at = 0.0
        self.heard_at = 0.0

    @property
    def engine(self) -> LaneEngine:
        """What it runs, wherever."""
        return self.spec.engine if self.serves is None else self.serves.engine

    @property
    def head(self) -> HeadSpec | None:
        """The drafting head that it runs, if it does."""
        return self.spec.head if self.serves is None else self.serves.head

    @property
    def serving(self) -> bool:
        return self.state is LaneState.SERVING

    @property
    def idle(self) -> bool:
        """Takes an order now."""
        return self.serving and self.link.state is LinkState.IDLE

    def step(self, event: LaneEvent) -> None:
        self.state = LANE_TABLE.step(self.state, event)
