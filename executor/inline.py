"""A lane as a thread of this process: for debuggers, and to compare with. It isolates nothing.

Lanes and coordinator share one interpreter, so they run in turns as far as they run Python.
"""

from __future__ import annotations

import importlib
import time
from typing import TYPE_CHECKING, Any

from executor.thread_worker import ThreadWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from executor.lane import Lane
    from executor.placement import Placement
    from ipc.channel import Hub
    from ipc.messages import LaneName


def start(lane: Lane, hub: Hub, placements: Mapping[LaneName, Placement]) -> InlineWorker:
    """A lane in a thread of this process, whose place is this process's own."""
    return InlineWorker(lane, hub)


class InlineWorker(ThreadWorker):
    patience = 2.0
    """An idle session looks up every second."""

    def __init__(self, lane: Lane, hub: Hub) -> None:
        # By name, like the process that is otherwise started: the executor depends on no worker's code.
        sessions: Any = importlib.import_module("workers.session")
        self._session = sessions.Session(lane.name, lane.epoch, hub.peer(lane.identity), time.monotonic())
        super().__init__(f"speclane-{lane.name}")

    def work(self) -> int:
        status: int = self._session.run()
        return status

    def leave(self) -> None:
        self._session.leave()
