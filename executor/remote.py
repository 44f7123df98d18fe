"""A lane that a speculator server runs, for this executor and others. Its worker is the connection to it.

What for a process is its death is here a connection that is lost. Starting again is attaching again: to the
first of its servers that serves, however long that takes, once one of them has served or none need to.
"""

from __future__ import annotations

import os
import signal
import socket
from typing import TYPE_CHECKING

from executor.errors import InvalidConfig
from executor.thread_worker import ThreadWorker
from ipc import keys
from ipc.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from executor.lane import Lane
    from executor.worker import Worker
    from ipc.channel import Hub
    from ipc.relay import Relay


class Attachments:
    """Starts lanes, wherever they run; knows which servers are worth waiting for."""

    def __init__(
        self, directory: Path | None, start_here: Callable[[Lane, Hub], Worker], patient: Sequence[str] = ()
    ) -> None:
        """`directory`: of a client's keys, None for none. `start_here`: starts a lane that runs on this host.
        `patient`: servers that are waited for, though none of them has served.

        Raises InvalidConfig about `keys`.
        """
        self._keys = client_keys(directory) if directory is not None else None
        self._start_here = start_here
        self._awaited = set(patient)
        """Of those that have served, too: who was there once will be again."""

    def start(self, lane: Lane, hub: Hub) -> Worker:
        """Raises OSError, SpeclaneError."""
        if lane.spec.engine != "remote":
            return self._start_here(lane, hub)
        from ipc.relay import Errand, Relay  # takes a while to import, and few lanes are remote

        servers = lane.spec.model
        errand = Errand(
            identity=lane.identity,
            epoch=lane.epoch,
            client=f"{socket.gethostname()}/{os.getpid()}",
            addresses=servers.split(","),
            keys=self._keys,
            fails_fast=servers not in self._awaited,
            advice="or try --speculator ngram",
        )
        return RemoteWorker(Relay(hub, errand), lambda: self._awaited.add(servers))


def client_keys(directory: Path) -> keys.ClientKeys:
    """Raises InvalidConfig about `keys`."""
    try:
        return keys.read_client(directory)
    except WireError as error:
        raise InvalidConfig("keys", f"keys: {error}") from error


class RemoteWorker(ThreadWorker):
    patience = 5.0
    """A relay looks up at once; only a name that is being resolved holds it up."""

    def __init__(self, relay: Relay, on_served: Callable[[], None]) -> None:
        """`on_served` is called, in another thread, when it ends and had been attached."""
        self._relay = relay
        self._on_served = on_served
        self._reason = ""
        super().__init__("speclane-relay")

    def work(self) -> int:
        try:
            self._reason = self._relay.run()
        finally:
            if self._relay.address:
                self._on_served()
        return -signal.SIGKILL if self._relay.stopped else 1 if self._reason else 0

    def leave(self) -> None:
        """Hangs up; the server goes on."""
        self._relay.stop()

    def stderr_tail(self) -> str:
        """Why it ended. What the server writes stays with it."""
        return self._reason

    def free(self) -> None:
        self._relay.close()
