"""One real worker, spoken to by hand: its first words, its answers, and how it refuses nonsense."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, get_args

import pytest

from executor.process import WorkerProcess
from ipc.channel import Arrived, Hub
from ipc.messages import (
    WIRE_VERSION,
    Allocate,
    Close,
    Configure,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Failed,
    Greeted,
    LaneSpec,
    Loaded,
    Open,
    OpenedSequence,
    Phase,
    PhaseReached,
    Profile,
    Profiled,
    Ready,
    SamplingSpec,
    Stop,
    Verified,
    Verify,
    VerifyItem,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ipc.messages import Fact, LaneName, Order

EPOCH = "e1"
SAMPLING = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)
SEQUENCE = OpenedSequence(5, 2, [1, 2, 3], 3, SAMPLING)


class Conversation:
    """The coordinator's end of one worker."""

    def __init__(self, directory: Path, lane: LaneName) -> None:
        self.lane = lane
        self.hub = Hub(directory)
        self.worker = WorkerProcess(lane, EPOCH, self.hub.endpoint, 1)

    def hear(self) -> Fact:
        event = self.hub.receive(time.monotonic() + 30.0)
        assert isinstance(event, Arrived)
        assert event.identity == f"{self.lane}/{EPOCH}"
        return event.fact

    def say(self, order: Order) -> None:
        self.hub.send(f"{self.lane}/{EPOCH}", order)

    def configure(self, engine: str = "toy", model: str = "vocabulary=64,context=32") -> list[Fact]:
        """Everything up to Ready."""
        facts = [self.hear()]
        self.say(Configure(EPOCH, LaneSpec(self.lane, engine, model, "fp32", "cpu", 1, 2, 32)))
        while not isinstance(facts[-1], Ready | Failed):
            facts.append(self.hear())
            match facts[-1]:
                case Loaded():
                    self.say(Profile(EPOCH))
                case Profiled(profile=profile):
                    self.say(Allocate(EPOCH, profile.max_kv_tokens))
        return facts

    def exit_status(self) -> int | None:
        return self.worker.wait(time.monotonic() + 30.0)

    def close(self) -> None:
        self.worker.close()
        self.hub.close()


@pytest.fixture
def target(directory: Path) -> Iterator[Conversation]:
    conversation = Conversation(directory, "target")
    yield conversation
    conversation.close()


@pytest.fixture
def speculator(directory: Path) -> Iterator[Conversation]:
    conversation = Conversation(directory, "speculator")
    yield conversation
    conversation.close()


def test_the_start_in_order(target: Conversation):
    greeted, *phases, ready = target.configure()
    assert greeted == Greeted(EPOCH, WIRE_VERSION, "target", target.worker.pid)
    steps = [fact for fact in phases if isinstance(fact, PhaseReached)]
    assert [step.phase for step in steps] == list(get_args(Phase))
    assert all(step.seconds >= 0 and step.resident_bytes > 1 << 20 for step in steps)
    assert [(step.phase, step.outcome) for step in steps if step.outcome] == [
        ("allocate", "128 tokens"),
        ("capture", "none"),
    ]
    profiled = next(fact for fact in phases if isinstance(fact, Profiled))
    assert (profiled.profile.device_id, profiled.profile.max_kv_tokens) == ("cpu", 128)
    assert (ready.vocabulary.size, ready.max_model_len) == (64, 32)
    target.say(Stop(EPOCH))
    assert target.exit_status() == 0


def test_a_verdict_does_not_hang_on_how_it_came_about(target: Conversation):
    target.configure()
    target.say(Open(EPOCH, [SEQUENCE]))
    tokens: list[int] = []
    for order in range(5):
        target.say(Verify(EPOCH, order, [VerifyItem(5, 2, 3 + order, tokens[-1:], [])]))
        fact = target.hear()
        assert isinstance(fact, Verified)
        tokens.append(fact.items[0].next_token)
    target.say(Close(EPOCH, [5]))
    target.say(Open(EPOCH, [SEQUENCE]))
    wrong = (tokens[3] + 1) % 64
    target.say(Verify(EPOCH, 9, [VerifyItem(5, 2, 3, [], [*tokens[:3], wrong, 0])]))
    fact = target.hear()
    assert isinstance(fact, Verified)
    assert (fact.order, fact.items[0].n_accepted, fact.items[0].next_token) == (9, 3, tokens[3])
    assert fact.busy_ns > 0
    target.say(Verify(EPOCH, 10, [VerifyItem(5, 2, 7, tokens[:4], [])]))
    fact = target.hear()
    assert isinstance(fact, Verified)
    assert fact.items[0].next_token == tokens[4]


def test_a_lookup_is_answered_with_its_sequence_generation_and_length(speculator: Conversation):
    *_, ready = speculator.configure("ngram", "")
    assert ready.vocabulary.size == 0
    speculator.say(Open(EPOCH, [OpenedSequence(5, 2, [1, 2, 3, 1], 1, SAMPLING)]))
    speculator.say(Draft(EPOCH, 7, [DraftItem(5, 2, 5, [2], 2)]))
    fact = speculator.hear()
    assert isinstance(fact, Drafted)
    assert (fact.order, fact.items) == (7, [DraftedItem(5, 2, 5, [3, 1])])


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        ([Stop("another")], "order for epoch another, this is e1"),
        ([Draft(EPOCH, 1, [])], "Draft is not legal in state idle"),
        ([Configure(EPOCH, LaneSpec("target", "toy", "", "fp32", "cpu", 1, 1, 8))], "Configure is not legal"),
        ([Close(EPOCH, [5])], "sequence 5 is not open"),
        ([Open(EPOCH, [SEQUENCE, SEQUENCE])], "sequence 5 is open already"),
        ([Verify(EPOCH, 1, [VerifyItem(5, 2, 3, [], [])])], "sequence 5 of generation 2 is not open"),
        (
            [Open(EPOCH, [SEQUENCE]), Verify(EPOCH, 1, [VerifyItem(5, 1, 3, [], [])])],
            "sequence 5 of generation 1 is of generation 2",
        ),
        (
            [Open(EPOCH, [SEQUENCE]), Verify(EPOCH, 1, [VerifyItem(5, 2, 9, [4], [])])],
            "base_len 9 with 1 new tokens, but the lane has 3",
        ),
        (
            [Open(EPOCH, [SEQUENCE]), Verify(EPOCH, 1, [VerifyItem(5, 2, 3, [], [64])])],
            "token 64 is outside the vocabulary of 64",
        ),
        (
            [Open(EPOCH, [SEQUENCE]), Verify(EPOCH, 1, [VerifyItem(5, 2, 4, [-1], [])])],
            "token -1 is outside the vocabulary of 64",
        ),
    ],
)
def test_an_order_that_makes_no_sense_ends_the_worker_with_a_reason(target: Conversation, orders, says):
    target.configure()
    for order in orders:
        target.say(order)
    failed = target.hear()
    assert isinstance(failed, Failed)
    assert (failed.epoch, failed.kind) == (EPOCH, "protocol")
    assert says in failed.message
    assert target.exit_status() == 4


def test_what_is_no_order_ends_the_worker_with_a_reason(target: Conversation):
    target.configure()
    target.hub._socket.send_multipart([f"target/{EPOCH}".encode(), b"\xc1"])
    failed = target.hear()
    assert isinstance(failed, Failed)
    assert failed.kind == "protocol"
    assert target.exit_status() == 4


def test_more_sequences_than_seats(target: Conversation):
    target.configure()
    target.say(Open(EPOCH, [OpenedSequence(i, 0, [1], 1, SAMPLING) for i in range(3)]))
    failed = target.hear()
    assert isinstance(failed, Failed)
    assert (failed.kind, target.exit_status()) == ("memory", 5)
    assert "max_sequences=2 are open" in failed.message


@pytest.mark.parametrize(
    ("engine", "model", "kind", "status"),
    [
        ("toy", "orbit=1", "configuration", 2),
        ("ngram", "", "configuration", 2),
        ("native", "/nowhere", "load", 3),
    ],
)
def test_a_model_that_cannot_be(target: Conversation, engine, model, kind, status):
    *_, failed = target.configure(engine, model)
    assert isinstance(failed, Failed)
    assert failed.kind == kind
    assert "\n" not in failed.message
    assert target.exit_status() == status
    assert "Traceback" in target.worker.stderr_tail()
