"""What the launcher concludes from a daemon's answers, by a clock of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_preflight import DIRECTORY, MPS
from test_shipped_topologies import GPUS

from executor.launch import mps_watch
from executor.launch.child import State
from executor.launch.mps_watch import MpsWatch
from executor.launch.plan import make_plan
from executor.launch.topology import parse
from executor.mps import MpsFailed

LANES = {"main": {"target": 11, "speculator": 12}}


class Daemon:
    """Answers as told."""

    def __init__(self) -> None:
        self.listed = {11: 1, 12: 1}
        self.faults: list[int] = []
        self.silent = False

    def clients(self) -> dict[int, int]:
        if self.silent:
            raise MpsFailed("no answer")
        return self.listed

    def faulty(self) -> list[int]:
        return self.faults


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(mps_watch, "time", clock)
    return clock


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


def watch_of(daemon: Daemon, clock: Clock, text: str = MPS) -> MpsWatch:
    watch = MpsWatch(make_plan(parse(text), GPUS, DIRECTORY))
    watch._controls = {"a": daemon}
    watch._answered["a"] = clock.now
    return watch


def test_all_is_well(daemon, clock):
    watch = watch_of(daemon, clock)
    assert watch.daemons == {"a": Path(DIRECTORY / "mps-a")}
    seen = watch.look("a", State.STARTING, {})
    assert (seen.ready, seen.strays, seen.broken) == (True, {}, "")
    assert watch.look("a", State.READY, LANES).strays == {}
    assert not watch.look("a", State.STOPPING, LANES).ready


def test_a_lane_has_a_while_to_attach(daemon, clock):
    watch = watch_of(daemon, clock)
    daemon.listed = {11: 1}
    assert watch.look("a", State.READY, LANES).strays == {}
    assert not watch.attached("a", LANES)
    clock.now += 9
    assert watch.look("a", State.READY, LANES).strays == {}
    clock.now += 2
    (reason,) = watch.look("a", State.READY, LANES).strays.values()
    assert reason.startswith("its speculator lane (12) is no client of the MPS daemon")
    successor = {"main": {"target": 11, "speculator": 13}}
    assert watch.look("a", State.READY, successor).strays == {}
    daemon.listed = {11: 1, 13: 1}
    clock.now += 20
    assert watch.look("a", State.READY, successor).strays == {}
    assert watch.attached("a", successor)
    daemon.listed = {}  # who was attached once is not looked for again: it may be between two servers
    clock.now += 20
    assert watch.look("a", State.READY, successor).strays == {}


def test_process_ids_that_cannot_be_compared_are_trusted(daemon, clock):
    watch = watch_of(daemon, clock, MPS.replace("mps = {}", 'mps = { attach = "trust" }'))
    daemon.listed = {}
    watch.look("a", State.READY, LANES)
    assert watch.attached("a", LANES)
    clock.now += 60
    assert watch.look("a", State.READY, LANES).strays == {}


def test_a_fault_that_passes_is_left_alone(daemon, clock):
    watch = watch_of(daemon, clock)
    daemon.faults = [1]
    assert watch.look("a", State.READY, LANES).broken == ""
    clock.now += 5
    daemon.faults = []
    assert watch.look("a", State.READY, LANES).broken == ""
    clock.now += 6
    daemon.faults = [1]
    assert watch.look("a", State.READY, LANES).broken == ""
    clock.now += 11
    assert watch.look("a", State.READY, LANES).broken == (
        "MPS server 1 stays in its fault: clients of before it are left"
    )


def test_a_daemon_that_hangs_is_broken(daemon, clock):
    watch = watch_of(daemon, clock)
    daemon.silent = True
    clock.now += 14
    assert (watch.look("a", State.READY, LANES).ready, watch.look("a", State.READY, LANES).broken) == (
        False,
        "",
    )
    clock.now += 2
    assert watch.look("a", State.READY, LANES).broken == "no answer"
