"""Runs a plan: starts its processes in order, restarts those that die, drains them, and says how it ended.

One loop, one thread. What a process is in is `child.CHILD_TABLE`; what to do about it is decided here.
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import time
from logging import ERROR, INFO, WARNING
from typing import TYPE_CHECKING, Any

from executor import notify
from executor.events import record
from executor.launch import report
from executor.launch.child import Child, Event, State
from executor.launch.ear import Ear
from executor.launch.mps_watch import MpsWatch
from executor.launch.places import NOTIFY
from executor.launch.plan import attaching_later
from executor.restart import RestartPolicy

if TYPE_CHECKING:
    from executor.launch.places import PrivateDirectory, StateDirectory
    from executor.launch.plan import Kind, LaunchPlan
    from executor.notify import Notifier

CLEAN, FAILED, BAD_INPUT, CUT_OFF = 0, 1, 2, 3
"""Exit statuses: all drained; one process failed for good; one refused what it was told; answers cut off."""
_TICK_SECONDS = 0.1
_ENDING_SECONDS = 5.0
"""What a process gets that has to be ended, before it is killed."""
_GRACE_SECONDS = 10.0
"""What a process may take to end beyond the time that answers under way get."""
_STOP_ORDER: tuple[Kind, ...] = ("target", "speculator", "mps")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Launcher:
    def __init__(
        self, plan: LaunchPlan, private: PrivateDirectory, state: StateDirectory, notifier: Notifier
    ) -> None:
        """`notifier`: to whoever started the launcher."""
        self._plan = plan
        self._private = private
        self._state = state
        self._notifier = notifier
        self._rules = plan.topology.supervision
        policy = RestartPolicy(intensity=self._rules.intensity, period=self._rules.period)
        self.children = [Child(each, policy, state.log(each.name)) for each in plan.processes]
        self._by_name = {child.name: child for child in self.children}
        self._mps = MpsWatch(plan)
        self._served = False
        """Whether all were ready once: before that, any death is the end."""
        self._stops = 0
        self._status = CLEAN
        self._kill_at: dict[str, float] = {}
        self._published: dict[str, Any] = {}
        self._unwritten = False
        """Whether the status file lags behind."""
        self._since = time.time()
        self.failure = ""
        """Why it ended, if not because it was told to."""

    async def run(self) -> int:
        """Until it is told to stop, or cannot go on. An exit status. Raises OSError for want of a socket."""
        loop = asyncio.get_running_loop()
        self._ear = Ear(self._private.path / NOTIFY)
        loop.add_reader(self._ear.fileno(), self._hear)
        hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # unlike under nohup
        heeded = [number for number in _SIGNALS if number is not signal.SIGHUP or hangs_up]
        for number in heeded:
            loop.add_signal_handler(number, self.stop)
        watching = asyncio.create_task(self._watch_mps())
        try:
            while not self._over:
                self._tick(time.monotonic())
                if watching.done():
                    watching.result()
                await asyncio.sleep(_TICK_SECONDS)
        finally:
            watching.cancel()
            for child in self.children:
                child.kill()
            self._publish()
            for number in heeded:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # what is left to do, a compute mode, is put back whole
            loop.remove_reader(self._ear.fileno())
            self._ear.close()
        return self._status

    def stop(self) -> None:
        """Drain. The second time answers under way are cut off, the third time everything is killed."""
        self._stops += 1
        if self._stops == 1:
            record(INFO, "launch_draining", topology=self._plan.topology.name)
            seconds = self._rules.drain + len(_STOP_ORDER) * 2 * _GRACE_SECONDS
            self._notifier.say(**{notify.STOPPING: "1", notify.EXTEND: f"{seconds * 1e6:.0f}"})
        for child in self.children:
            if self._stops == 2 and child.state is State.STOPPING:
                child.signal(signal.SIGTERM)
            elif self._stops > 2:
                child.kill()

    # ------------------------------------------------------------ what is due

    @property
    def _over(self) -> bool:
        return self._stops > 0 and all(child.pid is None for child in self.children)

    def _tick(self, now: float) -> None:
        for child in self.children:
            self._reap(child, now)
        if self._stops:
            self._stop_next(now)
        for child in self.children:
            self._advance(child, now)
        if not self._served and all(child.state is State.READY for child in self.children) and self._attached:
            self._served = True
            name, urls = self._plan.topology.name, [child.facts.get(notify.URL) for child in self.children]
            told = ",".join(url for url in urls if url)
            record(INFO, "launch_ready", topology=name, urls=told, status=self._state.status_file)
        self._publish()
        if self._notifier.watchdog_seconds is not None:
            self._notifier.alive()

    def _advance(self, child: Child, now: float) -> None:
        silent = now - child.heard_at
        if child.state is State.WAITING and not self._stops and now >= child.due and self._has_needs(child):
            self._start(child, now)
        elif child.state is State.STARTING and now - child.started_at > self._rules.start:
            self._condemn(child, f"not ready within {self._rules.start:g} s", signal.SIGABRT, now)
        elif child.state is State.READY and notify.WATCHDOG in child.facts and silent > self._rules.watchdog:
            self._condemn(child, f"no sign of life for {silent:.0f} s", signal.SIGABRT, now)
        elif now >= self._kill_at.get(child.name, now + 1) and child.pid is not None:
            record(WARNING, "process_killed", name=child.name, pid=child.pid, reason="did not end in time")
            del self._kill_at[child.name]
            child.kill()

    def _has_needs(self, child: Child) -> bool:
        """A daemon must be ready. So must a speculator at first; later a target attaches when it is there."""
        needed = [self._by_name[name] for name in child.plan.needs]
        return all(
            each.state is State.READY for each in needed if each.plan.kind == "mps" or not self._served
        )

    def _start(self, child: Child, now: float) -> None:
        watchdog = {
            notify.SOCKET: str(self._ear.path),
            notify.WATCHDOG_USEC: f"{self._rules.watchdog * 1e6:.0f}",
        }
        argv = child.plan.argv
        if self._served and child.plan.attaches:
            argv = attaching_later(argv)
        try:
            self._mps.prepare(child)
            child.start(argv, watchdog)
        except OSError as error:
            child.reason = f"cannot be started: {error.strerror}"
            self._mourn(child, now)
            return
        record(INFO, "process_started", name=child.name, pid=child.pid, log=child.log)

    def _condemn(self, child: Child, reason: str, number: signal.Signals, now: float) -> None:
        """End it; it will be started again."""
        if child.state not in (State.STARTING, State.READY):
            return
        child.reason = reason
        record(WARNING, "process_condemned", name=child.name, pid=child.pid, reason=reason)
        child.step(Event.CONDEMNED)
        child.signal(number)
        child.signal(signal.SIGCONT)  # who was stopped takes no signal otherwise
        self._kill_at[child.name] = now + _ENDING_SECONDS

    # ------------------------------------------------------------ what happens

    def _hear(self) -> None:
        while (heard := self._ear.hear()) is not None:
            child = next((each for each in self.children if each.pid == heard.pid), None)
            if child is None:
                continue
            before = child.facts.get(notify.HEALTH)
            child.heard_at = time.monotonic()
            child.facts |= heard.facts
            if heard.facts.get(notify.READY) == "1" and child.state is State.STARTING:
                self._ready(child)
            if (health := child.facts.get(notify.HEALTH)) != before and before is not None:
                record(INFO, "process_health", name=child.name, health=health)

    def _ready(self, child: Child) -> None:
        child.step(Event.READY)
        seconds = f"{time.monotonic() - child.started_at:.1f}"
        record(INFO, "process_ready", name=child.name, url=child.facts.get(notify.URL), seconds=seconds)

    def _reap(self, child: Child, now: float) -> None:
        if child.pidfd is None or not _ended(child.pidfd):
            return
        pid, was = child.pid, child.state
        reason = child.reap()
        self._kill_at.pop(child.name, None)
        if was is State.STOPPING:
            child.step(Event.DIED)
            record(INFO, "process_stopped", name=child.name, status=child.exit_status)
            if child.exit_status != 0 and child.plan.kind != "mps" and child.facts.get(notify.READY):
                self._status = self._status or CUT_OFF
            return
        child.step(Event.DIED)
        record(
            WARNING, "process_died", name=child.name, pid=pid, reason=reason, last=child.last_line() or None
        )
        self._mourn(child, now)

    def _mourn(self, child: Child, now: float) -> None:
        """It died, and nobody told it to end for good."""
        if self._stops:
            return
        if not self._served:
            self._fail(child, BAD_INPUT if child.exit_status == 2 else FAILED)
            return
        delay = child.history.died(now, random.random())
        if delay is None:
            record(ERROR, "process_given_up", name=child.name, starts=child.starts)
            if child.plan.kind == "speculator":
                child.step(Event.GIVEN_UP)
            else:
                self._fail(child, FAILED)
            return
        child.due = now + delay
        if child.plan.kind == "mps":
            self._end_group(child.plan.gpus[0], f"its MPS daemon {child.name} died", now)

    def _fail(self, child: Child, status: int) -> None:
        child.step(Event.GIVEN_UP)
        last = child.last_line()
        self.failure = f"{child.name} {child.reason}" + (f": {last}" if last else "") + f" (log: {child.log})"
        self._status = status
        self.stop()

    def _end_group(self, gpu: str, reason: str, now: float) -> None:
        """All under one MPS daemon start again together: while old clients are left, new ones are refused."""
        for child in self.children:
            if gpu in child.plan.gpus:
                self._condemn(child, reason, signal.SIGTERM, now)

    # ------------------------------------------------------------ the end

    def _stop_next(self, now: float) -> None:
        """Targets first, so that their answers can end; then those that served them."""
        for kind in _STOP_ORDER:
            mine = [child for child in self.children if child.plan.kind == kind]
            for child in mine:
                if child.state not in (State.STOPPING, State.STOPPED, State.FAILED):
                    self._tell_stop(child, now)
            if any(child.pid is not None for child in mine):
                return

    def _tell_stop(self, child: Child, now: float) -> None:
        ending = child.state is State.ENDING
        child.step(Event.STOP)
        if child.pid is None:
            return
        if child.plan.kind != "mps" or not self._mps.quit(child):
            child.signal(signal.SIGTERM)
        if not ending:
            answers = self._rules.drain if child.plan.kind == "target" else 0.0
            self._kill_at[child.name] = now + answers + _GRACE_SECONDS

    # ------------------------------------------------------------ MPS

    @property
    def _attached(self) -> bool:
        return all(
            self._mps.attached(gpu, report.clients(self._clients(gpu), gpu)) for gpu in self._mps.daemons
        )

    def _clients(self, gpu: str) -> dict[str, Child]:
        """Processes with a lane on this GPU."""
        return {
            child.name: child
            for child in self.children
            if child.plan.kind != "mps" and gpu in child.plan.gpus
        }

    async def _watch_mps(self) -> None:
        while self._mps.daemons:
            for gpu in self._mps.daemons:
                child = self._by_name[f"mps-{gpu}"]
                lanes = self._clients(gpu)
                seen = await asyncio.to_thread(self._mps.look, gpu, child.state, report.clients(lanes, gpu))
                now = time.monotonic()
                if seen.ready and child.state is State.STARTING:
                    self._ready(child)
                for name, reason in seen.strays.items():
                    self._condemn(lanes[name], reason, signal.SIGTERM, now)
                if seen.broken and child.state is State.READY:
                    self._condemn(child, seen.broken, signal.SIGTERM, now)
                    self._end_group(gpu, seen.broken, now)
            await asyncio.sleep(self._mps.period)

    # ------------------------------------------------------------ what others see

    def _publish(self) -> None:
        status = self._report()
        if status == self._published:
            return
        try:
            self._state.write(status)
        except OSError as error:  # a full disk is no reason to end what serves
            if not self._unwritten:
                record(WARNING, "status_not_written", reason=error.strerror)
            self._unwritten = True
        else:
            self._published, self._unwritten = status, False
        words = ", ".join(f"{child.name} {child.state}" for child in self.children)
        ready = {notify.READY: "1"} if self._served else {}
        self._notifier.say(**ready, **{notify.STATUS: f"{status['state']}: {words}"})

    def _report(self) -> dict[str, Any]:
        """What the status file says."""
        return {
            "topology": self._plan.topology.name,
            "pid": os.getpid(),
            "state": self._overall(),
            "since": self._since,
            "exit_status": self._status if self._over else None,
            "failure": self.failure or None,
            "processes": [report.process(child) for child in self.children],
        }

    def _overall(self) -> str:
        if self._over:
            return "failed" if self.failure else "stopped"
        if self._stops:
            return "draining"
        return report.serving(self.children) if self._served else "starting"


def _ended(pidfd: int) -> bool:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))
