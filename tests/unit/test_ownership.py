"""The fault this project exists for, on a fake device, and that ownership by (ubatch, lane) rules it out."""

from __future__ import annotations

from typing import get_args

import pytest
from fake_device import FakeDevice, IllegalAccess
from fake_lane import BYTE, UBATCH, FakeLane
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ipc.errors import ProtocolError
from ipc.messages import Phase
from workers.graphs import MovedStorage, Shape
from workers.workspace import Spec, Workspace, WorkspaceLocked

PHASES = get_args(Phase)
LANES = ("target", "speculator")
NEXT = dict(zip(("born", *PHASES), PHASES, strict=False))
WIDTH = {"target": 64, "speculator": 200}
CONSTANT = {"target": 3, "speculator": 5}
SHAPE = Shape(4, 3)


def start(lane: FakeLane, last: Phase = "serve") -> FakeLane:
    for phase in PHASES[: PHASES.index(last) + 1]:
        lane.take(phase)
    return lane


def made(name: str, device: FakeDevice, workspace: Workspace | None = None) -> FakeLane:
    workspace = workspace or Workspace(device, name)
    return FakeLane(device, workspace, CONSTANT[name], WIDTH[name])


# ---------------------------------------------------------------- one workspace for both lanes: the fault


def shared() -> tuple[FakeDevice, FakeLane, FakeLane]:
    """The target has captured; the speculator, of which its storage knows nothing, is still to come."""
    device = FakeDevice()
    workspace = Workspace(device, "both lanes")
    return device, start(made("target", device, workspace), "capture"), made("speculator", device, workspace)


def bare_replay(lane: FakeLane, value: int) -> int:
    """As an executor replays that does not look where its storage is."""
    lane.input.fill(value)
    lane.graphs._captured[SHAPE].graph.replay()
    return lane.output.value


def test_shared_storage_that_grew_is_written_after_it_was_given_back():
    _, target, speculator = shared()
    assert bare_replay(target, 10) == 13
    start(speculator, "attention_setup")
    with pytest.raises(IllegalAccess):
        bare_replay(target, 10)


def test_shared_storage_that_grew_corrupts_whoever_has_its_address_now():
    device, target, speculator = shared()
    address = target.workspace.address(UBATCH)
    start(speculator, "attention_setup")
    victim = device.allocate(1024)
    victim.fill(77)
    assert victim.address == address  # somebody's keys and values, say
    bare_replay(target, 10)
    assert victim.view(0, Spec((1024,), BYTE)).value != 77


def test_shared_storage_without_growth_is_overwritten_between_two_steps_of_the_other():
    device = FakeDevice()
    workspace = Workspace(device, "both lanes")
    speculator = start(made("speculator", device, workspace), "capture")
    target = start(FakeLane(device, workspace, 3, WIDTH["speculator"]), "capture")
    assert bare_replay(target, 10) == 13
    assert target.results[SHAPE].value == 13  # rows that the target's next step is going to read
    bare_replay(speculator, 50)
    assert target.results[SHAPE].value != 13


def test_shared_storage_that_is_locked_fails_the_first_draft():
    _, target, speculator = shared()
    target.take("lock")
    with pytest.raises(WorkspaceLocked, match="attention needs 2816 bytes, but it was locked at 1024"):
        start(speculator, "attention_setup")


def test_graphs_refuse_to_run_over_storage_that_moved():
    _, target, speculator = shared()
    start(speculator, "attention_setup")
    with pytest.raises(MovedStorage, match="was captured over storage"):
        target.answer(SHAPE, 10)


# ---------------------------------------------------------------- a workspace for each lane: no fault


@pytest.mark.parametrize("processes", [1, 2])
def test_lanes_that_own_their_storage_do_not_disturb_each_other(processes):
    devices = [FakeDevice() for _ in range(processes)]
    target = start(made("target", devices[0]), "lock")
    speculator = start(made("speculator", devices[-1]), "lock")
    assert target.answer(SHAPE, 10) == 13
    assert speculator.answer(SHAPE, 50) == 55
    assert (target.results[SHAPE].value, speculator.results[SHAPE].value) == (13, 55)


class BothLanes(RuleBasedStateMachine):
    """Both lanes in any legal order of steps, work, growth, preemption and restarts.

    Whatever one does, the other's graphs answer right, its keys and values and its last result stand, and its
    storage is where it was.
    """

    @initialize(processes=st.sampled_from([1, 2]))
    def begin(self, processes):
        devices = [FakeDevice() for _ in range(processes)]
        self.device = dict(zip(LANES, (devices[0], devices[-1]), strict=True))
        self.lanes = {name: self.made(name) for name in LANES}
        self.last: dict[str, tuple[Shape, int] | None] = dict.fromkeys(LANES)

    def made(self, name: str) -> FakeLane:
        return made(name, self.device[name])

    def seen(self, name: str) -> tuple:
        """What the other lane must not change."""
        lane = self.lanes[name]
        result = lane.results[self.last[name][0]].value if self.last[name] else None
        return lane.workspace.address(UBATCH), lane.workspace.generation(UBATCH), result, lane.kv_is_sound()

    def alone(self, name: str, act) -> None:
        """Do something with one lane, and look at the other."""
        other = LANES[1 - LANES.index(name)]
        before = self.seen(other)
        act()
        assert self.seen(other) == before

    @rule(name=st.sampled_from(LANES))
    def step(self, name):
        lane = self.lanes[name]
        if (phase := NEXT.get(lane.steps.phase)) is not None:
            self.last[name] = None  # steps use the scratch storage
            self.alone(name, lambda: lane.take(phase))

    @rule(name=st.sampled_from(LANES), steps=st.integers(2, len(PHASES)))
    def several_steps(self, name, steps):
        for _ in range(steps):
            self.step(name)

    @rule(name=st.sampled_from(LANES), phase=st.sampled_from(PHASES))
    def no_step_is_skipped_or_repeated(self, name, phase):
        lane = self.lanes[name]
        if phase != NEXT.get(lane.steps.phase):
            before = lane.steps.phase
            with pytest.raises(ProtocolError, match="is not legal in state"):
                lane.take(phase)
            assert lane.steps.phase == before

    @rule(
        name=st.sampled_from(LANES),
        shape=st.sampled_from([Shape(b, r) for b in (1, 2, 4) for r in (1, 3)]),
        value=st.integers(0, 99),
    )
    def work(self, name, shape, value):
        """A proposal of the speculator, a verification of the target."""
        lane = self.lanes[name]
        if lane.steps.phase in ("capture", "lock", "serve"):

            def answer():
                assert lane.answer(shape, value) == value + lane.constant
                lane.run(shape)  # as a step that is not captured
                self.last[name] = shape, value

            self.alone(name, answer)

    @rule(name=st.sampled_from(LANES), nbytes=st.integers(1, 8192))
    def grow(self, name, nbytes):
        lane = self.lanes[name]
        spec = Spec((nbytes,), BYTE)
        size = lane.workspace.nbytes
        if lane.steps.phase in ("lock", "serve"):
            need = -(-nbytes // 256) * 256
            if need > lane.workspace._arenas[UBATCH].size:
                with pytest.raises(WorkspaceLocked, match=f"late needs {need} bytes, but it was locked at"):
                    lane.workspace.reserve(UBATCH, "late", spec)
            assert lane.workspace.nbytes == size
        elif lane.steps.phase != "capture":
            self.last[name] = None
            self.alone(name, lambda: lane.workspace.take(UBATCH, "more", spec))

    @rule(name=st.sampled_from(LANES), number=st.integers(0, 3))
    def preempt(self, name, number):
        lane = self.lanes[name]
        if lane.kv:
            self.alone(name, lambda: lane.preempt(number))

    @rule(name=st.sampled_from(LANES))
    def restart(self, name):
        def again():
            self.lanes[name].die()
            self.lanes[name] = self.made(name)
            self.last[name] = None

        self.alone(name, again)

    @precondition(lambda self: hasattr(self, "lanes"))
    @invariant()
    def what_each_lane_holds_is_sound(self):
        for name, lane in self.lanes.items():
            assert lane.kv_is_sound()
            if last := self.last[name]:
                shape, value = last
                assert lane.results[shape].value == value + lane.constant


BothLanes.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, derandomize=True, deadline=None
)
TestBothLanes = BothLanes.TestCase


class OneWorkspace(BothLanes):
    """The same in one process, with one workspace for both."""

    def made(self, name: str) -> FakeLane:
        device = self.device["target"]
        if not hasattr(self, "workspace"):
            self.workspace = Workspace(device, "both lanes")
        return made(name, device, self.workspace)


def test_the_machine_finds_the_fault_where_lanes_share_a_workspace():
    found = settings(
        max_examples=200, stateful_step_count=40, derandomize=True, deadline=None, report_multiple_bugs=False
    )
    with pytest.raises((AssertionError, MovedStorage, WorkspaceLocked)):
        run_state_machine_as_test(OneWorkspace, settings=found)
