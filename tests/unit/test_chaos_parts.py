"""The parts of a chaos run without processes: schedule, histogram, comparison, and the injector's choices."""

from __future__ import annotations

import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.chaos.gaps import Gaps
from executor.chaos.injector import Injector
from executor.chaos.plan import Fault, FaultKind, Plan, make_faults, make_jobs
from executor.chaos.traffic import Outcome
from executor.config import Config
from executor.llm import LLM

KILL_SPECULATOR = FaultKind("speculator", signal.SIGKILL)
KILL_TARGET = FaultKind("target", signal.SIGKILL)
PLAN = Plan(
    config=Config(engine="toy"),
    requests=40,
    max_tokens=32,
    temperature=0.5,
    seed=7,
    faults={KILL_SPECULATOR: 3, KILL_TARGET: 2},
)


# ---------------------------------------------------------------- plan


def test_faults_are_seeded_and_spread_over_the_round():
    faults = make_faults(PLAN, 0, 1000, 500)
    assert faults == make_faults(PLAN, 0, 1000, 500)
    assert faults != make_faults(PLAN, 1, 1000, 500)
    assert sorted(fault.kind for fault in faults) == sorted([KILL_SPECULATOR] * 3 + [KILL_TARGET] * 2)
    for i, fault in enumerate(faults):
        assert 1001 + i * 90 <= fault.at <= 1001 + (i + 1) * 90
    assert make_faults(replace(PLAN, faults={}), 0, 0, 500) == []


def test_jobs_are_seeded_and_of_mixed_lengths():
    llm = LLM(engine="toy")
    jobs = make_jobs(llm, PLAN)
    assert jobs == make_jobs(llm, PLAN)
    assert len(jobs) == 40
    assert {8 <= job.params.max_tokens <= 32 for job in jobs} == {True}
    assert [job.params.seed for job in jobs] == list(range(7, 47))
    lengths = [len(job.prompt) for job in jobs]
    assert min(lengths) < 40
    assert max(lengths) > 300


def test_prompts_leave_room_for_the_answer():
    jobs = make_jobs(LLM(engine="toy", max_model_len=40), PLAN)
    assert max(len(job.prompt) for job in jobs) == 8


# ---------------------------------------------------------------- gaps


def test_no_gaps():
    assert Gaps().percentile(0.5) == 0.0


@given(st.lists(st.floats(2e-6, 1e4), min_size=1, max_size=50), st.sampled_from([0.5, 0.99, 1.0]))
def test_percentiles_are_close(values, share):
    gaps = Gaps()
    for value in values:
        gaps.record(value)
    exact = sorted(values)[max(1, -int(-share * len(values) // 1)) - 1]
    assert exact * 0.999 <= gaps.percentile(share) <= exact * 1.025
    assert (gaps.count, gaps.longest) == (len(values), max(values))


# ---------------------------------------------------------------- comparison


@pytest.mark.parametrize(
    ("streamed", "completed", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 9, 3], [1, 2, 3], 1),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3, 3], [1, 2, 3], 3),
        ([1, 2, 3], [1, 2], 2),
        ([], [], 0),
    ],
)
def test_where_an_outcome_differs(streamed, completed, position):
    assert Outcome(streamed, completed).first_difference([1, 2, 3]) == position


# ---------------------------------------------------------------- injector


class FakeLane:
    def __init__(self, name: str, epoch: str) -> None:
        self.name, self.epoch, self.serving = name, epoch, True
        self.signals: list[signal.Signals] = []
        self.takes = True
        self.process = SimpleNamespace(kill=self._kill)

    def _kill(self, number: signal.Signals) -> bool:
        if self.takes:
            self.signals.append(number)
        return self.takes


def test_a_fault_strikes_when_so_many_tokens_are_committed():
    lane = FakeLane("target", "a")
    injector = Injector(lambda: [lane])
    injector.add([Fault(5, KILL_TARGET)])
    injector.committed(4)
    assert (lane.signals, injector.pending) == ([], 1)
    injector.committed(3)
    assert (lane.signals, injector.pending, injector.all_back) == ([signal.SIGKILL], 0, False)
    assert [(event.kind, event.tokens) for event in injector.events] == [(KILL_TARGET, 7)]
    assert injector.counts(signal.SIGKILL) == {"target": 1}
    assert not injector.counts(signal.SIGSTOP)


def test_an_incarnation_is_struck_once():
    lanes = {"target": FakeLane("target", "a"), "speculator": FakeLane("speculator", "b")}
    injector = Injector(lambda: list(lanes.values()))
    injector.add([Fault(1, KILL_SPECULATOR), Fault(1, KILL_SPECULATOR), Fault(1, KILL_TARGET)])
    injector.committed(1)
    injector.committed(1)  # the coordinator has not noticed yet
    assert [lane.signals for lane in lanes.values()] == [[signal.SIGKILL], [signal.SIGKILL]]
    assert injector.pending == 1
    first = lanes["speculator"]
    lanes["speculator"] = FakeLane("speculator", "c")
    lanes["speculator"].serving = False
    injector.committed(1)
    assert injector.pending == 1
    lanes["speculator"].serving = True
    injector.committed(1)
    assert (injector.pending, lanes["speculator"].signals) == (0, [signal.SIGKILL])
    assert first.signals == [signal.SIGKILL]
    lanes["speculator"] = FakeLane("speculator", "d")
    lanes["target"] = FakeLane("target", "e")
    injector.look()
    assert injector.all_back
    assert all(event.back_seconds >= 0 for event in injector.events)


@pytest.mark.parametrize("gone", ["process", "signal", "lane"])
def test_a_fault_that_meets_nobody_waits(gone):
    lane = FakeLane("target", "a")
    if gone == "process":
        lane.process = None
    lane.takes = gone != "signal"
    injector = Injector(lambda: [] if gone == "lane" else [lane])
    injector.add([Fault(1, KILL_TARGET)])
    injector.committed(1)
    assert (injector.pending, injector.events, injector.all_back) == (1, [], True)
