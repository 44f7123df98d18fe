"""Every fault at every moment of either lane's life: no token is lost, repeated or changed.

One cell is one fault in one phase of one lane, with real processes. Phases:
* `boot` and `load`: of the first start, which then fails with one clear error;
* `boot again` and `load again`: of the successor of a lane that was killed;
* `idle`;
* `draft` or `verify`: an order is at hand;
* `drain`: an order is at hand while the executor closes;
* `stop`: told to stop.
"""

from __future__ import annotations

import itertools
import logging
import re
import signal
import threading
from typing import NamedTuple

import pytest
from faulty_worker import FAULTS

from executor import Closed, LaneFailed, Recovery, RestartPolicy
from executor.lane import LaneState

PHASES = ("boot", "load", "boot again", "load again", "idle", "draft", "verify", "drain", "stop")
LANES = ("target", "speculator")
TIMEOUTS = {"draft": 0.3, "hang": 1.0, "verify": 2.0, "stop": 1.0}
IDLE_SECONDS = 1.5
NEVER_ANSWERS = ("SIGSTOP", "hang", "stale epoch")


class Cell(NamedTuple):
    fault: str
    phase: str
    lane: str

    @property
    def exists(self) -> bool:
        """A target drafts nothing, a speculator verifies nothing."""
        return (self.phase, self.lane) not in (("draft", "target"), ("verify", "speculator"))

    @property
    def harmless(self) -> bool:
        """Not worth a death: late by less than any limit, or a stray word beside all that was due."""
        return self.fault == "slow" or (
            self.fault == "stale epoch" and self.phase in ("load", "load again", "idle", "stop")
        )

    @property
    def slow(self) -> bool:
        """Waits for the load timeout."""
        return self.fault in NEVER_ANSWERS and not self.harmless and self.phase.split()[0] in ("boot", "load")

    @property
    def reason(self) -> str:
        """What its death is put down to."""
        if self.fault in NEVER_ANSWERS:
            match self.phase.split()[0]:
                case "boot" | "load":
                    return r"not ready in time, .*in phase \w+( after|$)"
                case "idle":
                    return rf"idle and silent for {IDLE_SECONDS:g} s"
                case "draft":
                    return r"no draft within 1 s"
                case "verify":
                    return r"no verdict within 2 s"
        return {
            "SIGKILL": "killed by SIGKILL",
            "abort": "killed by SIGABRT",
            "exception": "RuntimeError: a fault on purpose",
            "garbage": r"sent a malformed frame \(",
        }[self.fault]


def cells(*phases: str):
    made = (Cell(*cell) for cell in itertools.product(FAULTS, phases, LANES))
    return pytest.mark.parametrize(
        "cell",
        [
            pytest.param(cell, id="-".join(cell), marks=[pytest.mark.slow] if cell.slow else [])
            for cell in made
            if cell.exists
        ],
    )


@pytest.fixture
def fault(cell, monkeypatch, inject):
    monkeypatch.setattr("executor.watchdog.IDLE_SECONDS", IDLE_SECONDS)
    return inject(cell.lane, cell.fault, cell.phase.removesuffix(" again"))


@pytest.fixture
def toys(faults):
    def make(load: float = 30.0):
        policy = RestartPolicy(intensity=100, backoff=0.01, backoff_max=0.05)
        return faults.toys(timeouts={"load": load, **TIMEOUTS}, recovery=Recovery(policy=policy))

    return make


@pytest.fixture
def healths(caplog):
    """The states of health as they came."""
    caplog.set_level(logging.INFO, logger="speclane")
    return lambda: re.findall(r"event=health_changed before=\w+ now=(\w+)", caplog.text)


def own_and_other(llm, cell):
    target, speculator = llm.coordinator.lanes
    return (target, speculator) if cell.lane == "target" else (speculator, target)


def assert_recovered(llm, cell, first, survivor, healths, faults, deaths, undisturbed) -> None:
    """The lane is back if it died, the other one was never touched, and drafts are accepted."""
    faults.wait_until_healthy(llm)
    own, other = own_and_other(llm, cell)
    assert other is survivor[0]
    assert other.process.pid == survivor[1]
    assert own.serving
    assert llm.coordinator.deaths == {"target": 0, "speculator": 0} | {cell.lane: deaths}
    if deaths:
        assert own.epoch != first.epoch
        meanwhile = "recovering" if cell.lane == "target" else "degraded"
        assert healths() == ["healthy", meanwhile, "healthy"]
    else:
        assert own is first
        assert healths() == ["healthy"]
    again = llm.generate(faults.prompt, faults.params)[0]
    assert again.token_ids == undisturbed.token_ids
    assert again.acceptance_length > 1.0


@cells("boot", "load")
def test_the_first_start(cell, fault, toys, faults, undisturbed, start_seconds):
    fault.arm()
    with_limit = toys(load=max(2.0, 4 * start_seconds)) if cell.slow else toys()
    if cell.harmless:
        with with_limit as llm:
            assert fault.fired
            assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
            assert llm.coordinator.health.state == "healthy"
            assert llm.coordinator._lanes.counts.strangers == (cell.fault == "stale epoch")
        return
    with pytest.raises(LaneFailed, match=f"^{cell.lane} lane failed: {cell.reason}") as failure:
        with_limit.start()
    assert fault.fired
    assert with_limit.coordinator.health.state == "failed"
    assert with_limit.coordinator.health.reason == str(failure.value)


@cells("boot again", "load again")
def test_the_start_of_a_successor(cell, fault, toys, faults, undisturbed, healths, start_seconds):
    with toys(load=max(2.0, 4 * start_seconds)) if cell.slow else toys() as llm:
        first, other = own_and_other(llm, cell)
        survivor = other, other.process.pid
        stream, tokens = llm.stream(faults.prompt, faults.params), []
        for delta in stream:
            if not tokens:
                fault.arm()
                first.process.kill(signal.SIGKILL)
            tokens += delta.token_ids
        assert tokens == undisturbed.token_ids
        faults.wait_for(lambda: fault.fired)
        deaths = 1 if cell.harmless else 2
        faults.wait_for(lambda: llm.coordinator.deaths[cell.lane] == deaths)
        assert_recovered(llm, cell, first, survivor, healths, faults, deaths, undisturbed)


@cells("idle", "draft", "verify")
def test_in_service(cell, fault, toys, faults, undisturbed, healths):
    with toys() as llm:
        first, other = own_and_other(llm, cell)
        survivor = other, other.process.pid
        if cell.phase == "idle":
            fault.arm()
            faults.wait_for(lambda: fault.fired and (cell.harmless or first.state is LaneState.DOWN))
        stream, tokens = llm.stream(faults.prompt, faults.params), []
        for delta in stream:
            tokens += delta.token_ids
            fault.arm()
        assert tokens == undisturbed.token_ids
        assert stream.completion.text == undisturbed.text
        assert fault.fired
        if not cell.harmless:
            faults.wait_for(lambda: first.state is LaneState.DOWN)
            assert re.match(cell.reason, first.down_because)
        assert_recovered(llm, cell, first, survivor, healths, faults, not cell.harmless, undisturbed)
        if cell.fault == "stale epoch":
            assert llm.coordinator._lanes.counts.strangers == 1


@cells("drain")
def test_while_it_closes(cell, fault, toys, faults, undisturbed):
    """The order at hand fails while all are being sent home: no process stays, no request is forgotten."""
    llm = toys()
    llm.start()
    lanes = llm.coordinator.lanes
    streams = [llm.stream(faults.prompt, faults.params) for _ in range(10)]  # two of them wait for a seat
    deltas = iter(streams[0])
    tokens = next(deltas).token_ids
    fault.arm()
    faults.wait_for(lambda: fault.fired)
    closer = threading.Thread(target=llm.close)
    closer.start()
    faults.wait_for(lambda: all(lane.state is LaneState.STOPPING for lane in lanes))
    fault.let_go()
    with pytest.raises(Closed):
        tokens.extend(token for delta in deltas for token in delta.token_ids)
    assert tokens == undisturbed.token_ids[: len(tokens)]
    for stream in streams[1:]:
        with pytest.raises(Closed):
            list(stream)
    closer.join()
    assert [lane.state for lane in lanes] == [LaneState.DOWN] * 2
    assert llm.coordinator.deaths == {"target": 0, "speculator": 0}


@cells("stop")
def test_when_told_to_stop(cell, fault, toys, faults, undisturbed):
    with toys() as llm:
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        lanes = llm.coordinator.lanes
        fault.arm()
    assert fault.fired
    assert [lane.state for lane in lanes] == [LaneState.DOWN] * 2
    assert llm.coordinator.deaths == {"target": 0, "speculator": 0}
