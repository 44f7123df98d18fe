"""Who runs: starts the lanes' workers, ends those that hang, restarts those that died. Owns the processes.

Knows no orders and no tokens. What is due is done by `tick`, so that no wait here ever delays a round.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from functools import partial
from logging import ERROR, INFO, WARNING
from typing import TYPE_CHECKING

from executor import descriptors
from executor.errors import LaneFailed, SpeclaneError
from executor.events import record
from executor.lane import Lane, LaneEvent, LaneState
from executor.restart import RestartHistory
from executor.watchdog import silent_too_long

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor.config import Recovery, Timeouts
    from executor.worker import Worker
    from ipc.channel import Hub
    from ipc.messages import LaneName, LaneSpec

_TICK_SECONDS = 0.5
_AWAY_SECONDS = 2.0
"""Who was away for so long, stopped perhaps, may have words of the lanes unread: their silence counts not."""
_DESCRIPTORS = 16
"""More than a worker costs its coordinator."""
_ENDING = ((0.0, signal.SIGUSR1), (0.2, signal.SIGABRT), (1.0, signal.SIGKILL))
"""How a hung worker is ended, in seconds after the verdict: it dumps its stacks, must abort, is killed."""
_RELEASE_SECONDS = 10.0
_RELEASE_POLL_SECONDS = 0.05
"""How long at most a successor waits until the GPU memory is free, and how often it looks."""


class Supervisor:
    """`current`: the incarnation of each lane that counts. Others are spares, coming in, or going.

    A lane that died keeps its seat, as current one or as spare, until its successor is started.
    """

    def __init__(
        self,
        hub: Hub,
        specs: Sequence[LaneSpec],
        timeouts: Timeouts,
        recovery: Recovery,
        start_worker: Callable[[Lane, Hub], Worker],
    ) -> None:
        """`start_worker` raises OSError or SpeclaneError."""
        self._hub = hub
        self._start_worker = start_worker
        self._timeouts = timeouts
        self._recovery = recovery
        self._histories = {spec.lane: RestartHistory(recovery.policy) for spec in specs}
        self._alive: list[Lane] = []
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._spares: dict[LaneName, Lane] = {}
        self._incoming: dict[str, Callable[[Lane], None]] = {}
        self._canaries: dict[int, Lane] = {}
        self.current = {spec.lane: Lane(spec) for spec in specs}
        self.by_identity: dict[str, Lane] = {}
        self.restarting = False
        """Whether a lane that dies is started again; not before all have served once."""
        self.dispensable: set[LaneName] = set()
        """Lanes that are started again even then: the others begin without them."""
        self.next_tick = 0.0
        self.ticked_at = time.monotonic()
        """When it last did what was due: at least every half second if its thread is well."""
        self.deaths: dict[LaneName, int] = {spec.lane: 0 for spec in specs}
        self.restarts: Counter[LaneName] = Counter()
        """How often a lane was started again, or a spare took its place."""
        self.given_up: set[LaneName] = set()
        self.on_change: Callable[[], None] = lambda: None
        self.on_dying: Callable[[Lane], None] = lambda lane: None
        """Called for a lane that is being killed, before that is over."""

    # ------------------------------------------------------------ start

    def start_all(self) -> None:
        """Raises LaneFailed if a process cannot be started."""
        for lane in self.current.values():
            self._spawn(lane)

    def start_standby(self) -> None:
        """Start a spare for each lane that is to have one."""
        for name in self._recovery.standby:
            if name in self.current:
                self._start_spare(name)

    def bring_in(self, spec: LaneSpec, then: Callable[[Lane], None]) -> None:
        """Start a lane beside those that run; `then` is called with it when it serves, or when it is down."""
        lane = Lane(spec)
        self._spawn(lane)
        self._incoming[lane.identity] = then

    def _spawn(self, lane: Lane) -> None:
        try:
            descriptors.require(_DESCRIPTORS * lane.spec.ranks)
            lane.process = self._start_worker(lane, self._hub)
        except (OSError, SpeclaneError) as error:
            raise LaneFailed(lane.name, f"its process cannot be started: {error}") from error
        lane.pids = lane.process.pids
        lane.started_at = lane.heard_at = time.monotonic()
        self.by_identity[lane.identity] = lane
        self._alive.append(lane)
        self._hub.watch(lane.process.pidfd)

    def _start_spare(self, name: LaneName) -> None:
        if name in self.current:
            spare = self._spares[name] = Lane(self.current[name].spec)
            self._spawn_again(spare)

    def _spawn_again(self, lane: Lane) -> None:
        """Like a worker that dies at boot, one that cannot be started is tried again by the policy."""
        try:
            self._spawn(lane)
        except LaneFailed as error:
            lane.down_because = error.reason
            lane.step(LaneEvent.ENDED)
            self._died(lane, None)

    # ------------------------------------------------------------ what happens to a lane

    def greeted(self, lane: Lane) -> None:
        """From now on it may be heard of that it is being killed."""
        if lane.process is not None and (lifeline := lane.process.lifeline) is not None:
            lifeline.listen()
            for canary in lifeline.canaries:
                self._canaries[canary] = lane
                self._hub.watch(canary)

    def broken(self, fd: int) -> None:
        """What was a canary, perhaps, is no more."""
        if (lane := self._canaries.get(fd)) is not None:
            self._forget_canaries(lane)
            self.on_dying(lane)

    def _forget_canaries(self, lane: Lane) -> None:
        for canary in [fd for fd, its in self._canaries.items() if its is lane]:
            self._hub.unwatch(canary)
            del self._canaries[canary]

    def ready(self, lane: Lane) -> None:
        lane.step(LaneEvent.READY)
        if (then := self._incoming.pop(lane.identity, None)) is not None:
            then(lane)
        elif self._spares.get(lane.name) is lane and not self._able(lane.name):
            self._promote_spare(lane.name)
        self.on_change()

    def _able(self, name: LaneName) -> bool:
        return self.current[name].state in (LaneState.STARTING, LaneState.SERVING)

    def replace(self, lane: Lane) -> list[Lane]:
        """Make a serving lane the current one of its name; returns those to let go, a spare included."""
        before = self.dismiss(lane.name)
        self.current[lane.name] = lane
        self._histories.setdefault(lane.name, RestartHistory(self._recovery.policy))
        self.deaths.setdefault(lane.name, 0)
        self.given_up.discard(lane.name)
        if lane.name in self._recovery.standby:
            self._start_spare(lane.name)
        return before

    def dismiss(self, name: LaneName) -> list[Lane]:
        """Have no lane of this name any more; returns those to let go, a spare included."""
        self.on_change()
        held = self.current.pop(name, None), self._spares.pop(name, None)
        return [lane for lane in held if lane is not None]

    def condemn(self, lane: Lane, reason: str) -> None:
        """End a lane that hangs, without waiting for it; its spare takes over at once."""
        lane.down_because = lane.down_because or reason
        lane.step(LaneEvent.CONDEMN)
        now = time.monotonic()
        for delay, number in _ENDING:
            self._at(now + delay, partial(_signal, lane, number))
        if self.current.get(lane.name) is lane:
            self._promote_spare(lane.name)
        self.on_change()

    def take_down(self, lane: Lane, reason: str) -> None:
        """Kill a lane that cannot be trusted any more."""
        if lane.process is not None:
            lane.process.kill()
            self.on_dying(lane)
        if lane.process is not None:  # else whoever heard of it could not be told, and this lane went with it
            lane.process.wait(time.monotonic() + 5.0)
        self.bury(lane, reason)

    @property
    def alive(self) -> list[Lane]:
        """Lanes that have a process, whatever they are and are to become."""
        return list(self._alive)

    @property
    def starting(self) -> list[Lane]:
        """Lanes that come to serve, current ones, spares and newcomers."""
        return [lane for lane in self._alive if lane.state is LaneState.STARTING]

    @property
    def specs(self) -> list[LaneSpec]:
        """Of all lanes that are to stay, or to be started again."""
        staying = [lane for lane in self._alive if lane.state in (LaneState.STARTING, LaneState.SERVING)]
        return [lane.spec for lane in (*staying, *self.current.values())]

    def by_pidfd(self, fd: int) -> Lane | None:
        """The lane whose process that is."""
        return next((lane for lane in self._alive if lane.process and lane.process.pidfd == fd), None)

    def bury(self, lane: Lane, reason: str) -> None:
        """The process has ended or was killed: free all that was held for it, and see to its successor."""
        if lane.process is not None:
            self.on_dying(lane)  # of several processes some may have to be ended yet, which takes time
        process = lane.process
        if process is None:
            return
        self._alive.remove(lane)
        del self.by_identity[lane.identity]
        self._hub.unwatch(process.pidfd)
        self._forget_canaries(lane)
        status = process.wait(time.monotonic() + 1.0)
        if status is not None:
            exit_text = process.describe_exit(status)
        else:
            exit_text = "did not stop in time and was killed"
        lane.down_because = lane.down_because or reason or exit_text
        lane.stderr_tail = process.stderr_tail()
        process.close()
        expected = lane.state is LaneState.STOPPING
        lane.step(LaneEvent.ENDED)
        lane.process = None  # only now: other threads read that a lane without a process serves no more
        if not expected:
            self._died(lane, process.pid)
        self.on_change()

    def _died(self, lane: Lane, pid: int | None) -> None:
        # Before all have served once, the death is an error that the caller sees.
        level = WARNING if self.restarting else INFO
        record(level, "lane_died", lane=lane.name, epoch=lane.epoch, pid=pid, reason=lane.down_because)
        self._mourn(lane)

    def _mourn(self, lane: Lane) -> None:
        """Who takes the place of a lane that died."""
        if (then := self._incoming.pop(lane.identity, None)) is not None:
            then(lane)
            return
        if not self.restarting and lane.name not in self.dispensable:
            return
        self.deaths[lane.name] += 1
        if self.current.get(lane.name) is lane:
            self._promote_spare(lane.name)
        if lane not in (self.current.get(lane.name), self._spares.get(lane.name)):
            return
        now = time.monotonic()
        delay = self._histories[lane.name].died(now, random.random())
        if delay is None:
            self.given_up.add(lane.name)
            record(ERROR, "lane_given_up", lane=lane.name, deaths=self.deaths[lane.name])
            return
        give_up_waiting = now + delay + _RELEASE_SECONDS
        self._at(now + delay, lambda: self._restart(lane, give_up_waiting))
        if self.current.get(lane.name) is lane and self._recovery.group == "one_for_all":
            self._end_others(lane)

    def _promote_spare(self, name: LaneName) -> None:
        """A spare that serves and the lane for which it stands in change seats."""
        spare = self._spares.get(name)
        if spare is not None and spare.serving:
            self._spares[name], self.current[name] = self.current[name], spare
            self.restarts[name] += 1
            record(WARNING, "lane_promoted", lane=name, epoch=spare.epoch)

    def _end_others(self, lane: Lane) -> None:
        """Lanes that share a GPU under MPS die of each other's GPU faults: they start again as one group."""
        for other in list(self.current.values()):
            if other is not lane and other.state in (LaneState.SERVING, LaneState.STARTING):
                self.take_down(other, f"ended together with the {lane.name} lane")

    def _restart(self, dead: Lane, give_up_waiting: float) -> None:
        """Start another in the seat that the dead one still has, once the GPU memory it held is free."""
        name = dead.name
        if dead not in (self.current.get(name), self._spares.get(name)):
            return
        now = time.monotonic()
        if dead.spec.device != "cpu" and _hold_memory(dead.pids):
            if now < give_up_waiting:
                self._at(now + _RELEASE_POLL_SECONDS, lambda: self._restart(dead, give_up_waiting))
                return
            record(WARNING, "memory_not_released", lane=name, pid=dead.pids[0])
        lane = Lane(dead.spec)
        if self.current.get(name) is dead:
            self.current[name] = lane
            self.restarts[name] += 1
            record(WARNING, "lane_restarted", lane=name, epoch=lane.epoch, restarts=self.restarts[name])
        else:
            self._spares[name] = lane
        self._spawn_again(lane)
        self.on_change()

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> None:
        """Do what is due."""
        due = [action for at, action in self._due if at <= now]
        self._due = [(at, action) for at, action in self._due if at > now]
        for action in due:
            action()
        self._excuse(now)
        for lane in list(self._alive):
            if lane.process is not None:
                lane.process.trim_stderr()
            if (reason := silent_too_long(lane, self._timeouts, now)) is not None:
                self.condemn(lane, reason)
        self.next_tick = min([now + _TICK_SECONDS, *(at for at, _ in self._due)])

    def _excuse(self, now: float) -> None:
        """Lanes answer for no time in which nobody listened, whatever they were doing."""
        away, self.ticked_at = now - self.ticked_at, now
        if away > _AWAY_SECONDS:
            for lane in self._alive:
                lane.started_at = min(lane.started_at + away, now)
                lane.asked_at = min(lane.asked_at + away, now)
                lane.heard_at = now

    def _at(self, when: float, action: Callable[[], None]) -> None:
        self._due.append((when, action))
        self.next_tick = min(self.next_tick, when)

    # ------------------------------------------------------------ stop

    def retire(self, lane: Lane, tell: Callable[[Lane], None]) -> None:
        """Let a lane go that is not needed any more; it is killed if it does not."""
        if lane.process is None:
            return
        lane.step(LaneEvent.STOP)
        tell(lane)
        self._at(time.monotonic() + self._timeouts.stop, partial(_signal, lane, signal.SIGKILL))

    def stop(self, tell: Callable[[Lane], None]) -> None:
        """Let every worker finish its order and exit; kill what has not in time."""
        self.restarting = False
        self._due.clear()
        self._incoming.clear()
        for lane in self._alive:
            deaf = (
                lane.state is LaneState.STARTING
            )  # hears nothing before it has loaded, and has nothing to lose
            lane.step(LaneEvent.STOP)
            if deaf:
                _signal(lane, signal.SIGKILL)
            else:
                tell(lane)
        deadline = time.monotonic() + self._timeouts.stop
        for lane in list(self._alive):
            assert lane.process is not None, "a lane that is alive has a process"
            if lane.process.wait(deadline) is None:
                record(
                    WARNING, "lane_killed", lane=lane.name, epoch=lane.epoch, reason="did not stop in time"
                )
                lane.process.kill()
            self.bury(lane, "stopped")


def _signal(lane: Lane, number: signal.Signals) -> None:
    if lane.process is not None:
        lane.process.kill(number)


def _hold_memory(pids: Sequence[int]) -> bool:
    from executor import gpu_memory  # NVML takes a while to import, and is asked only of the dead

    return any(map(gpu_memory.held_by, pids))
