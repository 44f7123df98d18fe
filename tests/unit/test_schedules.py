"""Rounds under any schedule: lanes that answer in any order, late, after a death, or twice. Same tokens.

The coordinator's own rounds and the workers' own lanes run in one thread, so that hypothesis decides what
happens next; toys are their models.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from letters import request

from executor.config import Timeouts
from executor.controller import Controller
from executor.lane import Lane, LaneEvent
from executor.lane_times import LaneTimes
from executor.lanes import WireCounts
from executor.leases import Leases
from executor.rounds import Rounds
from executor.setting import Setting
from executor.stats import Stats
from ipc.link import LinkState
from ipc.messages import (
    Cancel,
    Close,
    Draft,
    Drafted,
    LaneSpec,
    Open,
    Ready,
    SamplingSpec,
    Verified,
    Vocabulary,
)
from workers.engines.toy import ToyEngine
from workers.speculator import SpeculatorLane
from workers.speculators.draft import DraftSpeculator
from workers.target import TargetLane

SIZE = 16
NEW = 24
MODEL = f"vocabulary={SIZE},order=2"


def spec(name: str, model: str) -> LaneSpec:
    return LaneSpec(name, "toy", model, "fp32", "cpu", 1, 8, 256, num_speculative_tokens=4)  # type: ignore[arg-type]


class Worker:
    """A lane and what runs behind it; orders wait until it is told to `turn`."""

    def __init__(self, name: str, model: str) -> None:
        its = spec(name, model)
        self.lane = Lane(its)
        self.lane.step(LaneEvent.READY)
        self.lane.link.state = LinkState.IDLE
        self.lane.ready = Ready(self.lane.epoch, Vocabulary(SIZE, ""), 256, [])
        engine = ToyEngine(its)
        self.runs: Any = (
            TargetLane(engine, None) if name == "target" else SpeculatorLane(DraftSpeculator(engine))  # type: ignore[arg-type]
        )
        self.orders: list[Any] = []
        self.steps_left = 1 << 30

    def turn(self) -> bool:
        """Obey all orders; False if there is nothing to answer."""
        answered = False
        cancelled = [order.order for order in self.orders if isinstance(order, Cancel)]
        for order in self.orders:
            match order:
                case Open():
                    self.runs.open(order.sequences)
                case Close():
                    self.runs.close(order.seqs)
                case Draft():
                    hurry = order.order in cancelled
                    items = self.runs.draft(order.items, order.budget, "", lambda hurry=hurry: hurry)
                    self.lane.reply = Drafted(self.lane.epoch, order.order, items, 1000)
                    answered = True
                case Cancel():
                    pass
                case _:
                    verdicts, pending = self.runs.verify(order.items, order.prefill)
                    self.lane.reply = Verified(self.lane.epoch, order.order, verdicts, 1000, pending)
                    answered = True
        self.orders.clear()
        if answered:
            self.lane.in_flight = None
            self.lane.link.state = LinkState.IDLE
        return answered


class FakeLanes:
    def __init__(self, draft_model: str) -> None:
        self.draft_model = draft_model
        self.workers = {"target": Worker("target", MODEL), "speculator": Worker("speculator", draft_model)}
        self.counts = WireCounts()
        self.times = LaneTimes()
        leases = Leases(30.0)
        self.transport = SimpleNamespace(
            leases=leases, arena_for=lambda *lanes: "", reaches=lambda *what: True
        )
        self.supervisor = SimpleNamespace(take_down=self.take_down)

    @property
    def target(self) -> Lane:
        return self.workers["target"].lane

    @property
    def speculator(self) -> Lane:
        return self.workers["speculator"].lane

    @property
    def all(self) -> list[Lane]:
        return [self.target, self.speculator]

    def now(self) -> float:
        return time.monotonic()

    def tell(self, lane: Lane, order: Any) -> None:
        worker = self.workers[lane.name]
        if worker.lane is lane:
            lane.link.passed(order)
            worker.orders.append(order)

    def ask(self, lane: Lane, order: Any) -> None:
        lane.in_flight, lane.reply, lane.asked_at = order.order, None, self.now()
        self.tell(lane, order)

    def take(self, lane: Lane) -> Any:
        fact, lane.reply = lane.reply, None
        return fact

    def take_down(self, lane: Lane, reason: str) -> None:
        raise AssertionError(f"{lane.name}: {reason}")

    def kill(self, name: str) -> None:
        """It dies, and its successor serves at once."""
        self.workers[name].lane.step(LaneEvent.ENDED)
        self.workers[name] = Worker(name, MODEL if name == "target" else self.draft_model)


def sampling(seed: int, temperature: float) -> SamplingSpec:
    return SamplingSpec(temperature, 1.0, 0, 0.0, seed, 0, (), None)


def requests(count: int, temperature: float) -> list[Any]:
    made = [request([1 + i, 2, 3], max_tokens=NEW) for i in range(count)]
    for seq, its in enumerate(made):
        its.seq = seq
        its.spec = sampling(7 + seq, temperature)
    return made


def plain(count: int, temperature: float) -> list[list[int]]:
    """What the target says alone."""
    texts = []
    for its in requests(count, temperature):
        lanes = FakeLanes(MODEL)
        rounds = made_rounds(lanes, Setting(0))
        while its.finish_reason is None:
            rounds.collect()
            rounds.turn([its], None, hold=False)
            lanes.workers["target"].turn()
            rounds.collect()
        texts.append(its.tokens)
    return texts


def made_rounds(lanes: FakeLanes, setting: Setting) -> Rounds:
    rounds = Rounds(
        lanes,  # type: ignore[arg-type]
        Timeouts(draft=1000.0, draft_least=1000.0, hang=1000.0),
        Stats(),
        Controller(setting, adapts=False),
        1000,
        say=lambda its, delta: None,
        finish=lambda its: None,
        fail=lambda its, error: None,
    )
    rounds.vocabulary = Vocabulary(SIZE, "")
    rounds.max_model_len = 256
    return rounds


ACTIONS = ("target", "speculator", "both", "neither", "kill speculator", "kill target", "again", "impatience")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    actions=st.lists(st.sampled_from(ACTIONS), max_size=60),
    count=st.integers(1, 3),
    setting=st.sampled_from(
        [Setting(4), Setting(4, 1), Setting(3, 8), Setting(4, 8, 2), Setting(1, 2, 2), Setting(4, 0, 2)]
    ),
    temperature=st.sampled_from([0.0, 0.9]),
)
def test_any_schedule_gives_the_same_tokens(actions, count, setting, temperature):
    lanes = FakeLanes(f"{MODEL},agree=0.7,near=0.8")
    rounds = made_rounds(lanes, setting)
    running = requests(count, temperature)
    schedule = iter(actions)
    for _ in range(3000):
        rounds.collect()
        left = [its for its in running if its.finish_reason is None]
        if not left:
            break
        rounds.turn(left, None, hold=False)
        rounds.account()
        match next(schedule, "both"):
            case "both":
                lanes.workers["speculator"].turn()
                lanes.workers["target"].turn()
            case "target" | "speculator" as name:
                lanes.workers[name].turn()
            case "kill speculator":
                lanes.kill("speculator")
            case "kill target":
                lanes.kill("target")
            case "again":  # an answer that came before, and is an answer to nothing any more
                lane = lanes.speculator
                if lane.reply is None and lane.in_flight is None:
                    lane.reply = Drafted(lane.epoch, 1, [], 0)
            case "impatience":
                if (order := rounds._drafting._order) is not None and order.waited_until is not None:
                    order.waited_until = 0.0
    assert [its.tokens for its in running] == plain(count, temperature)
    assert rounds._stats.invalid == rounds._stats.quarantined == 0 or "kill speculator" in actions
    assert all(len(its.tokens) == 3 + NEW for its in running)


def test_nothing_is_prepared_for_a_sequence_that_has_lost_its_seat():
    lanes = FakeLanes(f"{MODEL},agree=0.7")
    rounds = made_rounds(lanes, Setting(3, 2))
    running = requests(2, 0.0)
    rounds.turn(running, {0, 1}, hold=False)
    lanes.workers["speculator"].turn()
    rounds.collect()
    rounds.turn(running, {0, 1}, hold=False)
    assert all(its.verifying for its in running)
    lanes.kill("speculator")
    rounds.collect()
    for its in running:
        its.draft_strikes, its.prepared_len = 0, 0
    rounds.turn(running, {0}, hold=False)
    assert set(lanes.speculator.told) == {0}
