"""The lanes' shell: carries orders and facts between the coordinator and whom the supervisor keeps running.

Knows nothing of requests or tokens. Every wait has a deadline.
Everything here runs in the coordinator's thread, except `wake` and `halt`.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import structs

from executor import descriptors, inline, ranks, vetting
from executor.address import AttachPolicy
from executor.admission import KvRoom
from executor.allocation import Allocation
from executor.errors import InvalidConfig, LaneFailed
from executor.lane import Lane, LaneState
from executor.lane_times import LaneTimes
from executor.placement import ANYWHERE
from executor.remote import Attachments
from executor.rundir import RunDir
from executor.supervisor import Supervisor
from executor.transport import Transport, TransportPolicy
from ipc.channel import Arrived, Garbled, Hub, Readable
from ipc.errors import PeerGone, ProtocolError, WireError
from ipc.link import LinkState
from ipc.messages import (
    WIRE_VERSION,
    Allocate,
    Configure,
    Draft,
    Drafted,
    Exported,
    Failed,
    Greeted,
    Imported,
    Loaded,
    PhaseReached,
    Profile,
    Profiled,
    Ready,
    Stop,
    Verified,
    Verify,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from executor.capacity import MemoryLimits, MemoryPlan
    from executor.config import Hosting, Recovery, Timeouts
    from executor.errors import SpeclaneError
    from executor.placement import Placement
    from ipc.channel import Event, Watched
    from ipc.messages import Fact, HiddenRows, LaneName, LaneSpec, Order, QRow

log = logging.getLogger("speclane")

_LAST_WORDS_SECONDS = 0.1
_DESCRIPTORS = 64
"""Open files that the lanes and their successors take at most, with some to spare."""


HOSTS = {"process": ranks, "inline": inline}


@dataclass(slots=True)
class WireCounts:
    """What was dropped, and why; shown to the user."""

    stale: int = 0
    strangers: int = 0
    garbled: int = 0


class Lanes:
    def __init__(
        self,
        specs: Sequence[LaneSpec],
        timeouts: Timeouts,
        recovery: Recovery,
        memory: MemoryLimits,
        hosting: Hosting,
        placements: Mapping[LaneName, Placement] = ANYWHERE,
        transport: TransportPolicy | None = None,
        attach: AttachPolicy | None = None,
    ) -> None:
        """Raises InvalidConfig if there is no place for the socket or there are no such keys, SpeclaneError
        for want of descriptors."""
        descriptors.require(_DESCRIPTORS)
        attach = attach or AttachPolicy()
        later = [spec for spec in specs if spec.engine == "remote" and attach.later]
        start_here = partial(HOSTS[hosting].start, placements=placements)
        attachments = Attachments(attach.keys, start_here, patient=[spec.model for spec in later])
        with ExitStack() as undo:
            self._rundir = RunDir()
            undo.callback(self._rundir.remove)
            self._hub = _hub(self._rundir)
            undo.callback(self._hub.close)
            self._alarm, self._call = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._hub.watch(self._alarm)
            undo.pop_all()
        self.supervisor = Supervisor(self._hub, specs, timeouts, recovery, attachments.start)
        self.supervisor.dispensable = {spec.lane for spec in later}
        self.supervisor.on_change = self._changed
        self._allocation = Allocation(memory, recovery.standby)
        self.transport = Transport(transport or TransportPolicy(), self._post, timeouts.draft)
        self.supervisor.on_dying = self.transport.dying
        self.counts = WireCounts()
        self.times = LaneTimes()
        self._woken = False
        self._halted = False
        self._allots = True
        self._others: dict[Watched, Callable[[], None]] = {}

    @property
    def target(self) -> Lane:
        return self.supervisor.current["target"]

    @property
    def speculator(self) -> Lane | None:
        return self.supervisor.current.get("speculator")

    @property
    def all(self) -> list[Lane]:
        """The current incarnations, the target's first."""
        return list(self.supervisor.current.values())

    @property
    def memory(self) -> MemoryPlan | None:
        """What each lane holds; None until all have profiled."""
        return self._allocation.plan

    @property
    def directory(self) -> Path:
        """Private to this executor; it goes when the lanes are stopped."""
        return self._rundir.path

    # ------------------------------------------------------------ start and stop

    def start(self, deadline: float) -> None:
        """Start all workers and wait until they serve, those that must; from then on they are restarted.

        Raises InvalidConfig if a worker says that it cannot become what it was told to, else LaneFailed.
        """
        self.supervisor.start_all()
        self._until(lambda: all(lane.serving for lane in self._needed) and self._transport_settled, deadline)
        if not self._halted:
            self.supervisor.restarting = True
            self.supervisor.start_standby()

    def plan(self, deadline: float) -> MemoryPlan:
        """Start all workers, but only to see what they need. Raises as `start`."""
        self.supervisor.start_all()
        self._allots = False
        self._until(lambda: self._allocation.plan is not None, deadline)
        assert self._allocation.plan is not None, "nobody halts lanes that only plan"
        return self._allocation.plan

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        while not (done() or self._halted):
            if self.transport.refusal is not None:
                raise self.transport.refusal
            for lane in self.all:
                if lane.state in (LaneState.DOWN, LaneState.CONDEMNED) and (
                    lane in self._needed or lane.refused
                ):
                    raise _refusal(lane)
            if time.monotonic() >= deadline:
                late = min((lane for lane in self._needed if not lane.serving), key=_waits_for_others)
                raise LaneFailed(late.name, f"not ready in time, in phase {late.phase}")
            self.turn(deadline)
            if self.supervisor.dispensable:  # who waits for one may have nothing to wait for any more
                self._allot()

    @property
    def _needed(self) -> list[Lane]:
        """The lanes without which there is no start."""
        return [lane for lane in self.all if lane.name not in self.supervisor.dispensable]

    @property
    def _transport_settled(self) -> bool:
        return self.transport.settled(lane.spec for lane in self.all)

    def stop(self) -> None:
        """End all workers, give them time to do it themselves. Frees everything.

        Nothing may be called after it, `wake` and `halt` included.
        """
        self.supervisor.stop(self._tell_stop)
        self.transport.close()
        self._hub.close()
        os.close(self._alarm)
        os.close(self._call)
        self._rundir.remove()

    def retire(self, lane: Lane) -> None:
        """Let a lane go that is not needed any more."""
        self.supervisor.retire(lane, self._tell_stop)
        self._allocation.keep(self.supervisor.specs)

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

    def now(self) -> float:
        """The clock by which rounds go, in seconds, monotonic."""
        return time.monotonic()

    def tell(self, lane: Lane, order: Order) -> None:
        """Send an order that has no answer. A lane that takes none is taken down."""
        self._post(lane, order)

    def ask(self, lane: Lane, order: Draft | Verify) -> None:
        """Send an order whose answer `take` will have, once `wait` returns for it."""
        lane.in_flight, lane.reply = order.order, None
        lane.asked_at = time.monotonic()
        lane.orders += 1
        released = self.transport.leases.take_released(lane.epoch)
        self._post(lane, structs.replace(order, released=released) if released else order)

    def take(self, lane: Lane) -> Drafted | Verified | None:
        """The answer to what was asked last, if it is there."""
        fact, lane.reply = lane.reply, None
        return fact

    def wait(self, deadline: float) -> None:
        """Handle what comes until a lane answers, its state changes, somebody wakes us, or the deadline
        passes.
        """
        while not (self._woken or self._halted) and self.turn(deadline):
            pass
        self._woken = False

    def attend(self, source: Watched, handle: Callable[[], None]) -> None:
        """From now on call `handle` when this is readable, between the events of lanes."""
        self._others[source] = handle
        self._hub.watch(source)

    # ------------------------------------------------------------ events

    def turn(self, deadline: float) -> bool:
        """Handle one event, or do what is due; False if nothing came before the deadline."""
        event = self._hub.receive(min(deadline, self.supervisor.next_tick))
        if event is not None:
            self._handle(event)
        now = time.monotonic()
        if now >= self.supervisor.next_tick:
            self.supervisor.tick(now)
            self.transport.look(now)
        return event is not None or now < deadline

    def _changed(self) -> None:
        self._allocation.keep(self.supervisor.specs)
        self.transport.reconcile(self.supervisor.alive)
        self._woken = True

    def _handle(self, event: Event) -> None:
        match event:
            case Readable(fd) if fd == self._alarm:
                os.read(fd, 4096)
                self._woken = True
            case Readable(source) if source in self._others:
                self._others[source]()
            case Readable(int(fd)):
                if (lane := self.supervisor.by_pidfd(fd)) is not None:
                    self._ended(lane)
                else:
                    self.supervisor.broken(fd)
            case Garbled(identity, reason):
                self.counts.garbled += 1
                if (lane := self.supervisor.by_identity.get(identity)) is not None:
                    self.supervisor.take_down(lane, f"sent a malformed frame ({reason})")
            case Arrived(identity, fact):
                lane = self.supervisor.by_identity.get(identity)
                if lane is None or fact.epoch != lane.epoch:
                    self.counts.strangers += 1
                else:
                    self._arrived(lane, fact)

    def _arrived(self, lane: Lane, fact: Fact) -> None:
        lane.heard_at = time.monotonic()
        try:
            lane.link.passed(fact)
        except ProtocolError as error:
            self.supervisor.take_down(lane, str(error))
            return
        match fact:
            case Greeted():
                self._greet(lane, fact)
            case PhaseReached():
                lane.phase = fact.phase
                megabytes = fact.resident_bytes / 1e6
                outcome = f": {fact.outcome}" if fact.outcome else ""
                log.info(
                    *("%s %s in %.2f s, %.0f MB resident%s", lane.name),
                    *(fact.phase, fact.seconds, megabytes, outcome),
                )
            case Loaded():
                self._loaded(lane, fact)
            case Exported():
                self.transport.exported(lane, fact)
            case Imported():
                self.transport.imported(lane, fact)
            case Profiled():
                lane.profiles = (fact.profile, *fact.peers)
                self._allot()
            case Ready():
                self._ready(lane, fact)
            case Drafted() | Verified():
                self._answered(lane, fact)
            case Failed():
                lane.refused = fact.kind in ("configuration", "load")
                # It exits by itself, but until it is seen to, it must not look like a lane that takes orders.
                self.supervisor.take_down(lane, fact.message)

    def _greet(self, lane: Lane, fact: Greeted) -> None:
        if fact.wire_version != WIRE_VERSION:
            self._refuse(lane, vetting.other_version(lane, fact.wire_version))
        elif fact.lane != lane.name:
            self.supervisor.take_down(lane, f"greets as {fact.lane}")
        else:
            self.supervisor.greeted(lane)
            self._post(lane, Configure(lane.epoch, lane.spec))

    def _loaded(self, lane: Lane, fact: Loaded) -> None:
        lane.device_ids, lane.serves = (fact.device_id, *fact.peers), fact.serves
        if reason := vetting.misfit(lane, self.supervisor.current.get("target")):
            self._refuse(lane, reason)
            return
        self.transport.loaded(lane, fact)  # first, so that what it exports is there when it profiles
        self._allot()

    def _refuse(self, lane: Lane, reason: str) -> None:
        """What it says of itself is of no use. The user named a server; a worker is of our own making."""
        lane.refused = lane.spec.engine == "remote"
        self.supervisor.take_down(lane, reason)

    def _allot(self) -> None:
        """Whose turn it is to profile, and who hears how much it may hold."""
        starting = [lane for lane in self.supervisor.starting if not self._absent(lane)]
        for lane in self._allocation.turns(starting):
            self._post(lane, Profile(lane.epoch))
        self._allocation.solve(starting)
        for lane in starting:
            if self._allots and lane.link.state is LinkState.PROFILED:
                self._allocate(lane)

    def _absent(self, lane: Lane) -> bool:
        """Whether nobody is there yet who would be this lane, and nobody waits for him."""
        return lane.name in self.supervisor.dispensable and lane.link.state is LinkState.EXPECTED

    def _allocate(self, lane: Lane) -> None:
        try:
            share = self._allocation.share(lane)
        except InvalidConfig as error:  # beside what runs; at the start it is no plan at all that is raised
            lane.refused = True
            self.supervisor.take_down(lane, str(error))
            return
        if share is not None and lane.profiles:
            profile = lane.profiles[0]
            # Another server than the one that was planned with may have less.
            tokens = min(share.kv_tokens, profile.max_kv_tokens)
            lane.room = KvRoom(tokens, profile.kv_block)
            self._post(lane, Allocate(lane.epoch, tokens))

    def _ready(self, lane: Lane, fact: Ready) -> None:
        if reason := vetting.foreign(lane, fact, self.supervisor.current.get("target")):
            self._refuse(lane, reason)
            return
        lane.ready, lane.phase, lane.ready_at = fact, "serve", time.monotonic()
        for note in fact.notes:
            log.info("%s: %s", lane.name, note)
        if lane.state is LaneState.STARTING:
            self.supervisor.ready(lane)

    def _answered(self, lane: Lane, fact: Drafted | Verified) -> None:
        lane.busy_ns += fact.busy_ns
        lane.reused = fact.reused
        self._note_slots(lane, fact)
        lane.answered_at = time.monotonic()
        if lane.state is LaneState.CONDEMNED:  # shaken out of its sleep by the signals that end it
            self.counts.stale += 1
            return
        if fact.order != lane.in_flight:
            self.counts.stale += 1
            self.times.late(lane.name, fact.busy_ns)
        else:
            lane.reply = fact
            self.times.answered(lane.name, lane.answered_at - lane.asked_at, fact.busy_ns)
        lane.in_flight = None
        self._woken = True

    def _note_slots(self, lane: Lane, fact: Drafted | Verified) -> None:
        """Whether the reply is of use or not, what it says of shared memory is so."""
        leases = self.transport.leases
        leases.acked(fact.acks, lane.epoch)
        parts: list[Sequence[HiddenRows] | Sequence[QRow]]
        if isinstance(fact, Verified):
            parts = [*(item.rows for item in fact.items), *(item.rows for item in fact.pending)]
        else:
            parts = [item.q for item in fact.items]
            parts += [each.q for item in fact.items for each in item.prepared]
        refs = [part.at.ref for rows in parts for part in rows if part.at is not None]
        leases.published(refs, time.monotonic())

    def _tell_stop(self, lane: Lane) -> None:
        self._post(lane, Stop(lane.epoch))

    def _post(self, lane: Lane, order: Order) -> None:
        if lane.process is None:
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
        if lane.state in (LaneState.STOPPING, LaneState.CONDEMNED):
            lane.process.kill()  # who cannot be told to stop has not begun to serve, or is gone already
        elif lane.process.wait(time.monotonic() + _LAST_WORDS_SECONDS) is not None:
            self._ended(lane)
        else:
            self.supervisor.take_down(lane, symptom)

    def _ended(self, lane: Lane) -> None:
        """The process is gone. If it went by itself, what it said last may still be on the way."""
        assert lane.process is not None, "only a started lane can end"
        self._hub.unwatch(lane.process.pidfd)
        exited = (lane.process.wait(0.0) or 0) > 0
        deadline = time.monotonic() + (_LAST_WORDS_SECONDS if exited else 0.0)
        while not lane.down_because and (event := self._hub.receive(deadline)) is not None:
            self._handle(event)
        self.supervisor.bury(lane, "")


def _waits_for_others(lane: Lane) -> bool:
    """Whether it has done its part of the start so far; such a lane is not the one that is late."""
    return lane.link.state in (LinkState.LOADED, LinkState.PROFILED)


def _refusal(lane: Lane) -> SpeclaneError:
    """Why a lane does not serve: what it was told to become cannot be, or it failed."""
    if lane.refused:
        return InvalidConfig(lane.name, f"{lane.name}: {lane.down_because}")
    return LaneFailed(lane.name, lane.down_because, lane.stderr_tail)


def _hub(rundir: RunDir) -> Hub:
    try:
        return Hub(rundir.path)
    except WireError as error:
        raise InvalidConfig(
            "XDG_RUNTIME_DIR",
            f"{error}; set XDG_RUNTIME_DIR to a short directory you can write, such as /tmp",
        ) from error
