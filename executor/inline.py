"""A lane as a thread of this process: for debuggers, and to compare with. It isolates nothing.

A thread cannot be killed: it ends between two orders, and one that hangs stays until the process ends. Lanes
and coordinator share one interpreter, so they run in turns as far as they run Python.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from executor.process import describe_exit

if TYPE_CHECKING:
    from collections.abc import Mapping

    from executor.lane import Lane
    from executor.placement import Placement
    from ipc.channel import Hub
    from ipc.lifeline import Lifeline
    from ipc.messages import LaneName


def start(lane: Lane, hub: Hub, placements: Mapping[LaneName, Placement]) -> InlineWorker:
    """A lane in a thread of this process, whose place is this process's own."""
    return InlineWorker(lane.name, lane.epoch, hub)


_LEAVE_SECONDS = 2.0
"""An idle session looks up every second."""


class InlineWorker:
    lifeline: Lifeline | None = None

    def __init__(self, lane: LaneName, epoch: str, hub: Hub) -> None:
        """Starts it."""
        # By name, like the process that is otherwise started: the executor depends on no worker's code.
        session: Any = importlib.import_module("workers.session")
        self.pid = os.getpid()
        self.pids = (self.pid,)
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._status: int | None = None
        self._session = session.Session(lane, epoch, hub.peer(f"{lane}/{epoch}"), time.monotonic())
        self._thread = threading.Thread(target=self._run, name=f"speclane-{lane}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        status = 1
        try:
            status = self._session.run()
        finally:
            self._status = status
            os.eventfd_write(self.pidfd, 1)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        if self._status is not None:
            return False
        if number in (signal.SIGKILL, signal.SIGABRT):
            self._session.leave()
        return True

    def wait(self, deadline: float) -> int | None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._status

    def describe_exit(self, status: int) -> str:
        return describe_exit(status)

    def stderr_tail(self) -> str:
        """It writes to this process's own."""
        return ""

    def trim_stderr(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        self._session.leave()
        self._thread.join(_LEAVE_SECONDS)
        if not self._thread.is_alive():  # else it hangs, and may still want to say that it has ended
            os.close(self.pidfd)
