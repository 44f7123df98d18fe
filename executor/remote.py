"""A lane that a speculator server runs, for this executor and others. Its worker is the connection to it.

What for a process is its death is here a connection that is lost. Starting again is attaching again: to the
first of its servers that serves, however long that takes, once one of them has served.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING

from executor.errors import InvalidConfig
from executor.process import describe_exit
from ipc import keys
from ipc.errors import WireError
from ipc.relay import Errand, Relay

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from executor.lane import Lane
    from executor.worker import Worker
    from ipc.channel import Hub
    from ipc.lifeline import Lifeline

_LEAVE_SECONDS = 5.0
"""A relay looks up at once; only a name that is being resolved holds it up."""


class Attachments:
    """Starts lanes, wherever they run; knows which servers have served."""

    def __init__(self, directory: Path | None, start_here: Callable[[Lane, Hub], Worker]) -> None:
        """`directory`: of a client's keys, None for none. `start_here`: starts a lane that runs on this host.

        Raises InvalidConfig about `keys`.
        """
        self._keys = client_keys(directory) if directory is not None else None
        self._start_here = start_here
        self._have_served: set[str] = set()

    def start(self, lane: Lane, hub: Hub) -> Worker:
        """Raises OSError, SpeclaneError."""
        if lane.spec.engine != "remote":
            return self._start_here(lane, hub)
        servers = lane.spec.model
        errand = Errand(
            identity=lane.identity,
            epoch=lane.epoch,
            client=f"{socket.gethostname()}/{os.getpid()}",
            addresses=servers.split(","),
            keys=self._keys,
            fails_fast=servers not in self._have_served,
            advice="or try --speculator ngram",
        )
        return RemoteWorker(Relay(hub, errand), lambda: self._have_served.add(servers))


def client_keys(directory: Path) -> keys.ClientKeys:
    """Raises InvalidConfig about `keys`."""
    try:
        return keys.read_client(directory)
    except WireError as error:
        raise InvalidConfig("keys", f"keys: {error}") from error


class RemoteWorker:
    lifeline: Lifeline | None = None

    def __init__(self, relay: Relay, on_served: Callable[[], None]) -> None:
        """Starts it. `on_served` is called, in another thread, when it ends and had been attached."""
        self.pid = os.getpid()
        self.pids = (self.pid,)
        self.pidfd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._relay = relay
        self._on_served = on_served
        self._status: int | None = None
        self._reason = ""
        self._thread = threading.Thread(target=self._run, name="speclane-relay", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        status = 1
        try:
            self._reason = self._relay.run()
            status = -signal.SIGKILL if self._relay.stopped else 1 if self._reason else 0
        finally:
            if self._relay.address:
                self._on_served()
            self._status = status
            os.eventfd_write(self.pidfd, 1)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Hangs up; the server goes on. Other signals than those that end a process reach nobody."""
        if self._status is not None:
            return False
        if number in (signal.SIGKILL, signal.SIGABRT):
            self._relay.stop()
        return True

    def wait(self, deadline: float) -> int | None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return self._status

    def describe_exit(self, status: int) -> str:
        return describe_exit(status)

    def stderr_tail(self) -> str:
        """What the server writes stays with it."""
        return self._reason

    def trim_stderr(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        if self._status is None:
            self._relay.stop()
        self._thread.join(_LEAVE_SECONDS)
        if not self._thread.is_alive():  # else it may still want to say that it has ended
            self._relay.close()
            os.close(self.pidfd)
