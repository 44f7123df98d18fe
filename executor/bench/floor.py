"""The floor under a round's overhead: the time in which a small frame goes to another process and back.

Run as a program it is that other process, and answers until it is killed or its parent is gone.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from executor.errors import SpeclaneError
from executor.rundir import RunDir
from ipc.channel import Arrived, Hub, Peer
from ipc.messages import WIRE_VERSION, Draft, Drafted, Greeted

if TYPE_CHECKING:
    from types import TracebackType

    from ipc.messages import Fact

_EPOCH = "floor"
_IDENTITY = f"speculator/{_EPOCH}"
_SECONDS = 30.0
_ORPHAN_SECONDS = 1.0


class Floor:
    """A context; inside it there is a process that does nothing but answer."""

    def __enter__(self) -> Floor:
        """Raises InvalidConfig, WireError or OSError if it cannot be started."""
        with ExitStack() as undo:
            rundir = RunDir()
            undo.callback(rundir.remove)
            self._hub = Hub(rundir.path)
            undo.callback(self._hub.close)
            command = [sys.executable, "-P", "-m", "executor.bench.floor", self._hub.endpoint]
            process = undo.enter_context(subprocess.Popen(command, stdin=subprocess.DEVNULL))
            undo.callback(process.kill)
            self._answer()
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def round_trip_us(self, count: int) -> float:
        """Median of so many, in microseconds, encoding and decoding included."""
        times = []
        for number in range(count):
            began = time.perf_counter_ns()
            self._hub.send(_IDENTITY, Draft(_EPOCH, number, []))
            self._answer()
            times.append(time.perf_counter_ns() - began)
        return statistics.median(times) / 1000

    def _answer(self) -> Fact:
        event = self._hub.receive(time.monotonic() + _SECONDS)
        if not isinstance(event, Arrived):
            raise SpeclaneError(f"the process that measures the wire's floor does not answer: {event}")
        return event.fact


def answer(endpoint: str) -> None:
    """What the other process does."""
    parent = os.getppid()
    peer = Peer(endpoint, _IDENTITY)
    peer.send(Greeted(_EPOCH, WIRE_VERSION, "speculator", os.getpid()))
    while os.getppid() == parent:
        if isinstance(order := peer.receive(time.monotonic() + _ORPHAN_SECONDS), Draft):
            peer.send(Drafted(_EPOCH, order.order, [], 0))


if __name__ == "__main__":
    answer(sys.argv[1])
