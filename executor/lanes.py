"""The lanes' shell: starts the workers, carries orders and facts, notices deaths. Owns hub and processes.

Knows nothing of requests or tokens. Every wait has a deadline; what did not come is a value, NoReply.
Everything here runs in the coordinator's thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from executor.errors import InvalidConfig, LaneFailed, SpeclaneError
from executor.lane import Lane, LaneEvent, LaneState
from executor.process import WorkerProcess, describe_exit
from executor.rundir import RunDir
from ipc.channel import Arrived, Garbled, Hub, Readable
from ipc.errors import PeerGone, ProtocolError, WireError
from ipc.messages import (
    WIRE_VERSION,
    Configure,
    Draft,
    Drafted,
    Failed,
    Greeted,
    PhaseReached,
    Ready,
    Stop,
    Verified,
    Verify,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ipc.channel import Event
    from ipc.messages import Fact, LaneSpec, Order

log = logging.getLogger("speclane")

_LAST_WORDS_SECONDS = 0.1
_DESCRIPTORS = 32
"""Open files that two lanes take at most, with some to spare."""


class NoReply(NamedTuple):
    """Why an order got no answer: `timeout`, `down` or `halted`."""

    reason: str


@dataclass(slots=True)
class WireCounts:
    """What was dropped, and why; shown to the user."""

    stale: int = 0
    strangers: int = 0
    garbled: int = 0


class Lanes:
    def __init__(self, specs: Iterable[LaneSpec]) -> None:
        """Raises InvalidConfig if there is no place for the socket, SpeclaneError for want of descriptors."""
        _check_descriptors()
        with ExitStack() as undo:
            self._rundir = RunDir()
            undo.callback(self._rundir.remove)
            self._hub = _hub(self._rundir)
            undo.callback(self._hub.close)
            self._alarm, self._call = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._hub.watch(self._alarm)
            undo.pop_all()
        self.all = [Lane(spec) for spec in specs]
        self.counts = WireCounts()
        self._by_identity = {lane.identity: lane for lane in self.all}
        self._by_pidfd: dict[int, Lane] = {}
        self._woken = False
        self._halted = False

    # ------------------------------------------------------------ start and stop

    def start(self, deadline: float) -> None:
        """Start all workers and wait until they serve. Raises LaneFailed."""
        for lane in self.all:
            try:
                lane.process = WorkerProcess(lane.name, lane.epoch, self._hub.endpoint, lane.spec.threads)
            except OSError as error:
                raise LaneFailed(lane.name, f"its process cannot be started: {error}") from error
            self._by_pidfd[lane.process.pidfd] = lane
            self._hub.watch(lane.process.pidfd)
        while waiting := [lane for lane in self.all if not lane.serving]:
            for lane in waiting:
                if lane.state is LaneState.DOWN:
                    raise LaneFailed(lane.name, lane.down_because, lane.stderr_tail)
            if self._halted:
                return
            if not self._turn(deadline):
                raise LaneFailed(waiting[0].name, f"not ready in time, still in phase {waiting[0].phase}")

    def stop(self, seconds: float) -> None:
        """Let every worker finish its order and exit; kill what has not after `seconds`. Frees everything.

        Nothing may be called after it, `wake` and `halt` included.
        """
        for lane in self.all:
            if lane.state is not LaneState.DOWN:
                lane.step(LaneEvent.STOP)
                self._post(lane, Stop(lane.epoch))
        deadline = time.monotonic() + seconds
        for lane in self.all:
            if lane.process is not None:
                if lane.process.wait(deadline) is None:
                    log.warning("%s lane did not stop within %g s and is killed", lane.name, seconds)
                    lane.process.kill()
                self._bury(lane, "stopped")
        self._hub.close()
        os.close(self._alarm)
        os.close(self._call)
        self._rundir.remove()

    def wake(self) -> None:
        """End the `wait` that runs, or the next one. May be called from any thread."""
        try:
            os.write(self._call, b"!")
        except BlockingIOError:
            return  # calls enough are waiting already

    def halt(self) -> None:
        """End every wait, for good: the executor is closing. May be called from any thread."""
        self._halted = True
        self.wake()

    # ------------------------------------------------------------ orders

    def tell(self, lane: Lane, order: Order) -> None:
        """Send an order that has no answer. A lane that takes none is taken down."""
        self._post(lane, order)

    def ask(self, lane: Lane, order: Draft | Verify) -> None:
        """Send an order whose answer `reply` waits for."""
        lane.in_flight, lane.reply, lane.abandoned = order.order, None, False
        lane.asked_at = time.monotonic()
        lane.orders += 1
        self._post(lane, order)

    def reply(self, lane: Lane, deadline: float) -> Drafted | Verified | NoReply:
        """The answer to what was asked last, or why there is none."""
        while lane.reply is None:
            if not lane.serving:
                return NoReply("down")
            if self._halted:
                return NoReply("halted")
            if not self._turn(deadline):
                lane.abandoned = True
                return NoReply("timeout")
        fact, lane.reply = lane.reply, None
        return fact

    def wait(self, deadline: float) -> None:
        """Handle what comes until somebody wakes us or the deadline passes."""
        while not (self._woken or self._halted) and self._turn(deadline):
            pass
        self._woken = False

    def take_down(self, lane: Lane, reason: str) -> None:
        """Kill a lane that cannot be trusted any more."""
        if lane.process is not None:
            lane.process.kill()
            lane.process.wait(time.monotonic() + 5.0)
        self._bury(lane, reason)

    # ------------------------------------------------------------ events

    def _turn(self, deadline: float) -> bool:
        """Handle one event; False if none came before the deadline."""
        event = self._hub.receive(deadline)
        if event is None:
            return False
        self._handle(event)
        return True

    def _handle(self, event: Event) -> None:
        match event:
            case Readable(fd) if fd == self._alarm:
                os.read(fd, 4096)
                self._woken = True
            case Readable(fd):
                self._ended(self._by_pidfd[fd])
            case Garbled(identity, reason):
                self.counts.garbled += 1
                if (lane := self._by_identity.get(identity)) is not None:
                    self.take_down(lane, f"sent a malformed frame ({reason})")
            case Arrived(identity, fact):
                lane = self._by_identity.get(identity)
                if lane is None or fact.epoch != lane.epoch:
                    self.counts.strangers += 1
                else:
                    self._arrived(lane, fact)

    def _arrived(self, lane: Lane, fact: Fact) -> None:
        try:
            lane.link.passed(fact)
        except ProtocolError as error:
            self.take_down(lane, str(error))
            return
        match fact:
            case Greeted():
                self._greet(lane, fact)
            case PhaseReached():
                lane.phase = fact.phase
                megabytes = fact.resident_bytes / 1e6
                log.info("%s %s in %.2f s, %.0f MB resident", lane.name, fact.phase, fact.seconds, megabytes)
            case Ready():
                lane.ready, lane.phase = fact, "serve"
                lane.step(LaneEvent.READY)
                for note in fact.notes:
                    log.info("%s: %s", lane.name, note)
            case Drafted() | Verified():
                self._answered(lane, fact)
            case Failed():
                # It exits by itself, but until it is seen to, it must not look like a lane that takes orders.
                self.take_down(lane, fact.message)

    def _greet(self, lane: Lane, fact: Greeted) -> None:
        if fact.wire_version != WIRE_VERSION:
            self.take_down(lane, f"speaks wire version {fact.wire_version}, this is {WIRE_VERSION}")
        elif fact.lane != lane.name:
            self.take_down(lane, f"greets as {fact.lane}")
        else:
            self._post(lane, Configure(lane.epoch, lane.spec))

    def _answered(self, lane: Lane, fact: Drafted | Verified) -> None:
        lane.busy_ns += fact.busy_ns
        if fact.order != lane.in_flight or lane.abandoned:
            self.counts.stale += 1
        else:
            lane.reply = fact
        lane.in_flight = None

    def _post(self, lane: Lane, order: Order) -> None:
        if lane.state is LaneState.DOWN:
            return
        try:
            lane.link.passed(order)
            self._hub.send(lane.identity, order)
        except PeerGone as error:
            self._unreachable(lane, str(error))

    def _unreachable(self, lane: Lane, symptom: str) -> None:
        """It takes no orders. If it died, that is the reason to give, and it may have said why."""
        if lane.process is None:
            return
        if lane.state is LaneState.STOPPING:
            lane.process.kill()  # who cannot be told to stop has not begun to serve, or is gone already
        elif lane.process.wait(time.monotonic() + _LAST_WORDS_SECONDS) is not None:
            self._ended(lane)
        else:
            self.take_down(lane, symptom)

    def _ended(self, lane: Lane) -> None:
        """The process is gone; what it said last may still be on the way."""
        self._hub.unwatch(self._pidfd(lane))
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while not lane.down_because and self._turn(deadline):
            pass
        self._bury(lane, "")

    def _bury(self, lane: Lane, reason: str) -> None:
        process, lane.process = lane.process, None
        if process is None:
            return
        del self._by_pidfd[process.pidfd]
        with contextlib.suppress(KeyError):  # was unwatched when it ended
            self._hub.unwatch(process.pidfd)
        status = process.wait(time.monotonic() + 1.0)
        exit_text = describe_exit(status) if status is not None else "did not stop in time and was killed"
        lane.down_because = lane.down_because or reason or exit_text
        lane.stderr_tail = process.stderr_tail()
        process.close()
        if lane.state is not LaneState.STOPPING:
            log.warning("%s lane is down: %s", lane.name, lane.down_because)
        lane.step(LaneEvent.ENDED)

    def _pidfd(self, lane: Lane) -> int:
        assert lane.process is not None, "only a started lane can end"
        return lane.process.pidfd


def _hub(rundir: RunDir) -> Hub:
    try:
        return Hub(rundir.path)
    except WireError as error:
        raise InvalidConfig(
            "XDG_RUNTIME_DIR",
            f"{error}; set XDG_RUNTIME_DIR to a short directory you can write, such as /tmp",
        ) from error


def _check_descriptors() -> None:
    """Raises SpeclaneError if too few are left. Asked first: libzmq aborts the process when it runs out."""
    with ExitStack() as opened:
        try:
            for _ in range(_DESCRIPTORS):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise SpeclaneError(
                f"{error.strerror}: fewer than {_DESCRIPTORS} of the limit of {limit} are left; "
                f"raise it, for example with `ulimit -n {2 * limit}`"
            ) from error
