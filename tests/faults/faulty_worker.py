"""A real worker with one fault: `python faulty_worker.py FAULT PHASE DIRECTORY` and a worker's own options.

The fault strikes once, at the first moment of its phase at which DIRECTORY/armed exists, and leaves
DIRECTORY/fired: the successor is sound. It strikes at the worker's end of the wire, where each phase has a
message of its own, so that all above is the real worker. `none` has no fault.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import msgspec

from ipc import channel
from ipc.channel import Peer
from ipc.messages import Draft, Drafted, Greeted, Open, PhaseReached, Progressed, Stop, Verified, Verify
from workers import __main__ as workers_main
from workers import session

if TYPE_CHECKING:
    from collections.abc import Callable

    from ipc.messages import Fact, Order

SLOW_SECONDS = 0.4
"""What a slow worker takes for what otherwise takes a twentieth of it, or less."""
PROGRESS_SECONDS = 0.05
POISON = 0
"""A sequence whose prompt begins with this token kills the worker when so many more are committed."""
POISON_AFTER = 10


class FaultyPeer(Peer):
    fault: ClassVar[str]
    phase: ClassVar[str]
    directory: ClassVar[Path]
    _poisoned: ClassVar[dict[int, int]] = {}
    """By sequence, the length from which on it kills."""

    def send(self, fact: Fact) -> None:
        if self.phase in _phases(fact) and self._fires():
            if self.phase == "drain":
                self._await("go")
            FAULTS[self.fault](self, fact)
        else:
            super().send(fact)

    def receive(self, deadline: float) -> Order | None:
        order = super().receive(deadline)
        if isinstance(order, Stop) and self.phase == "stop" and self._fires():
            FAULTS[self.fault](self, Progressed(order.epoch, 0))
        if self.phase == "poison":
            self._taste(order)
        return order

    def _taste(self, order: Order | None) -> None:
        if isinstance(order, Open):
            bad = [opened for opened in order.sequences if opened.tokens[0] == POISON]
            self._poisoned.update({opened.seq: opened.prompt_len + POISON_AFTER for opened in bad})
        elif isinstance(order, Draft | Verify):
            for item in order.items:
                if item.seq in self._poisoned and item.base_len >= self._poisoned[item.seq]:
                    FAULTS[self.fault](self, Progressed(order.epoch, 0))

    def _fires(self) -> bool:
        if not (self.directory / "armed").exists():
            return False
        try:
            (self.directory / "fired").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _await(self, name: str) -> None:
        deadline = time.monotonic() + 30.0
        while not (self.directory / name).exists() and time.monotonic() < deadline:
            time.sleep(0.002)


def _phases(fact: Fact) -> tuple[str, ...]:
    """In which phases the fact is sent."""
    match fact:
        case Greeted():
            return ("boot",)
        case PhaseReached(phase="load"):
            return ("load",)
        case Progressed():
            return ("idle",)
        case Drafted():
            return ("draft", "drain")
        case Verified():
            return ("verify", "drain")
    return ()


def hang(peer: FaultyPeer, fact: Fact) -> None:
    """In C, with the GIL held, as a deadlocked extension would."""
    libc = ctypes.PyDLL(None)
    while True:
        libc.sleep(3600)


def raise_error(peer: FaultyPeer, fact: Fact) -> None:
    raise RuntimeError("a fault on purpose")


def send_slowly(peer: FaultyPeer, fact: Fact) -> None:
    time.sleep(SLOW_SECONDS)
    Peer.send(peer, fact)


FAULTS: dict[str, Callable[[FaultyPeer, Fact], object]] = {
    "SIGKILL": lambda peer, fact: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSTOP": lambda peer, fact: os.kill(os.getpid(), signal.SIGSTOP),
    "abort": lambda peer, fact: os.abort(),
    "exception": raise_error,
    "hang": hang,
    "garbage": lambda peer, fact: peer._socket.send(b"\xc1"),
    "stale epoch": lambda peer, fact: Peer.send(peer, msgspec.structs.replace(fact, epoch="past")),
    "slow": send_slowly,
}


def main() -> int:
    FaultyPeer.fault, FaultyPeer.phase, directory, *options = sys.argv[1:]
    FaultyPeer.directory = Path(directory)
    channel.Peer = FaultyPeer
    session.PROGRESS_SECONDS = PROGRESS_SECONDS
    return workers_main.main(options)


if __name__ == "__main__":
    sys.exit(main())
