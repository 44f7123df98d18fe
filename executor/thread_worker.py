"""A lane's worker that is a thread of this process.

A thread cannot be killed: it is asked to leave, and looks up now and then. One that does not stays until the
process ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from executor.process import describe_exit

if TYPE_CHECKING:
    from ipc.lifeline import Lifeline


class ThreadWorker:
    """See executor.worker.Worker. `patience`: seconds within which it leaves, if all is well."""

    lifeline: Lifeline | None = None
    patience: float

    def __init__(self, name: str) -> None:
        """Starts it: what it runs must be there already."""
        self.pid = os.getpid()
        self.pids = (self.pid,)
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._status: int | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def work(self) -> int:
        """Until it is over. The exit status that a process would have."""
        raise NotImplementedError

    def leave(self) -> None:
        """Let `work` return soon. May be called from any thread, until `free`."""
        raise NotImplementedError

    def free(self) -> None:
        """What `work` has not freed, after it has returned."""

    def _run(self) -> None:
        status = 1
        try:
            status = self.work()
        finally:
            self._status = status
            os.eventfd_write(self.pidfd, 1)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Other signals than those that end a process reach nobody."""
        if self._status is not None:
            return False
        if number in (signal.SIGKILL, signal.SIGABRT):
            self.leave()
        return True

    def wait(self, deadline: float) -> int | None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._status

    def describe_exit(self, status: int) -> str:
        return describe_exit(status)

    def stderr_tail(self) -> str:
        """What it writes goes to this process's own stderr."""
        return ""

    def trim_stderr(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        if self._status is None:
            self.leave()
        self._thread.join(self.patience)
        if not self._thread.is_alive():  # else it may still want to say that it has ended
            self.free()
            os.close(self.pidfd)
