"""A speculator server and its clients in trouble: whoever dies, hangs or talks nonsense, no text changes and
nobody else is disturbed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from pooled import TARGET, attached, server

from executor import LLM, SamplingParams, Timeouts
from executor.config import Recovery, RestartPolicy
from executor.errors import InvalidConfig, LaneFailed
from executor.rundir import RunDir
from ipc import codec
from ipc.messages import (
    WIRE_VERSION,
    Allocate,
    Attach,
    Close,
    Configure,
    Draft,
    DraftItem,
    Failed,
    LaneSpec,
    Open,
    OpenedSequence,
    Profile,
    SamplingSpec,
    Unmap,
)

PROMPT = "a prompt that is drafted for"
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=150)
GREEDY = SamplingSpec(0.0, 1.0, 0, 0.0, 1, 0, (), None)
SPEC = LaneSpec("speculator", "remote", "x", "bf16", "cpu", 1, 8, 4096, 5)
PATIENT = Timeouts(draft=60.0, draft_least=60.0, hang=60.0, stop=20.0)
SELDOM = Recovery(policy=RestartPolicy(intensity=1))


@pytest.fixture(scope="module")
def plain() -> list[int]:
    with LLM(engine="toy", target=TARGET, speculator="off", threads=1) as llm:
        return llm.generate(PROMPT, PARAMS)[0].token_ids


@pytest.fixture
def place(directory):
    yield directory
    RunDir().remove()  # and what those left who were killed


def said(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, PARAMS)[0].token_ids


def drafted(llm: LLM) -> int:
    return sum(llm.coordinator.stats.acceptance.accepted)


def epoch(llm: LLM) -> str:
    return llm.coordinator.lanes[1].epoch


@contextmanager
def undisturbed(llm: LLM, plain: list[int], faults):
    """What happens meanwhile reaches neither what this executor says nor its lane."""
    before, missed = epoch(llm), llm.coordinator.stats.missed
    end, failures, turns = threading.Event(), [], []

    def traffic() -> None:
        while not end.is_set():
            if said(llm) != plain:
                failures.append("other tokens")
            turns.append(1)

    thread = threading.Thread(target=traffic)
    thread.start()
    try:
        yield
        done = len(turns)
        faults.wait_for(lambda: len(turns) >= done + 2)  # it goes on after what happened, too
    finally:
        end.set()
        thread.join()
    assert failures == []
    assert epoch(llm) == before
    assert llm.coordinator.stats.missed == missed
    assert llm.coordinator.health.state == "healthy"


def test_the_death_of_an_executor_is_no_matter_to_the_others(place, plain, faults):
    script = Path(__file__).with_name("attached_executor.py")
    with (
        server(f"ipc://{place}/s", clients=2) as (address, _),
        attached(address, timeouts=PATIENT) as llm,
        undisturbed(llm, plain, faults),
    ):
        with subprocess.Popen(
            [sys.executable, str(script), address], stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "drafted\n"
            other.send_signal(signal.SIGKILL)
        # Its seat is free again: of two, one was its.
        faults.wait_for(lambda: attaches(address))


def attaches(address: str) -> bool:
    with stranger(address) as client:
        client.attach()
        return not isinstance(client.hear(), Failed)


def test_a_server_that_is_killed_costs_speed_and_comes_back(place, plain, faults):
    bind = f"ipc://{place}/s"
    with (
        server(bind) as (address, first),
        attached(address, timeouts=PATIENT) as one,
        attached(address, timeouts=PATIENT) as two,
    ):
        before = epoch(one), epoch(two)
        streams = [llm.stream(PROMPT, PARAMS) for llm in (one, two)]
        for llm, stream in zip((one, two), streams, strict=True):
            for number, _ in enumerate(stream):
                if number == 1 and llm is one:
                    first.send_signal(signal.SIGKILL)
                    first.wait()
                    for each in (one, two):
                        faults.wait_for(lambda each=each: each.coordinator.health.state == "degraded")
        assert [stream.completion.token_ids for stream in streams] == [plain, plain]
        assert said(one) == said(two) == plain
        with server(bind):
            for llm, old in zip((one, two), before, strict=True):
                faults.wait_until_healthy(llm)
                assert epoch(llm) != old
                count = drafted(llm)
                assert said(llm) == plain
                assert drafted(llm) > count


def test_an_executor_may_begin_before_its_server(place, plain, faults):
    address = f"ipc://{place}/s"
    with attached(address, timeouts=PATIENT, attach="later") as llm:
        assert llm.coordinator.health.state == "degraded"
        assert said(llm) == plain
        with server(address):
            faults.wait_until_healthy(llm)
            assert said(llm) == plain
            assert drafted(llm) > 0
        with pytest.raises(LaneFailed, match="no speculator server at ipc:///nowhere"):
            llm.swap_speculator("ipc:///nowhere")  # who asks for one now wants to know


def test_a_server_that_dies_while_the_target_loads_is_no_matter_to_it(place, plain, faults):
    address = f"ipc://{place}/s"
    llm = attached(address, timeouts=PATIENT, attach="later")
    starting = threading.Thread(target=llm.start)
    with server(address) as (_, process):
        starting.start()
        faults.wait_for(lambda: llm._coordinator is not None and llm.coordinator.lanes[0].process)
        target, speculator = llm.coordinator.lanes
        target.process.kill(signal.SIGSTOP)
        faults.wait_for(lambda: speculator.serves is not None)
        process.kill()
        faults.wait_for(lambda: llm.coordinator.deaths["speculator"] == 1)
        target.process.kill(signal.SIGCONT)
        starting.join()
    with llm:
        assert said(llm) == plain
        assert llm.coordinator.health.state == "degraded"
        with server(address):
            faults.wait_until_healthy(llm)
            assert said(llm) == plain
            assert drafted(llm) > 0


def test_a_server_that_is_no_good_is_told_at_the_start(place, faults):
    with server(f"ipc://{place}/s", "--max-sequences=2") as (address, _):
        llm = attached(address, attach="later")
        failed: list[Exception] = []

        def start() -> None:
            try:
                llm.start()
            except InvalidConfig as error:
                failed.append(error)

        starting = threading.Thread(target=start)
        starting.start()
        faults.wait_for(lambda: llm._coordinator is not None and llm.coordinator.lanes[0].process)
        llm.coordinator.lanes[0].process.kill(signal.SIGSTOP)  # which it might come before otherwise
        starting.join()
    assert "try --max-sequences 2" in str(failed[0])


def test_the_lane_of_a_server_dies_and_is_started_again(place, plain, faults):
    with server(f"ipc://{place}/s") as (address, process), attached(address, timeouts=PATIENT) as llm:
        assert said(llm) == plain
        before = epoch(llm)
        (lane,) = psutil.Process(process.pid).children()
        lane.kill()
        faults.wait_for(lambda: epoch(llm) != before)
        faults.wait_until_healthy(llm)
        count = drafted(llm)
        assert said(llm) == plain
        assert drafted(llm) > count
        assert process.poll() is None


def test_the_next_server_takes_over(place, plain, faults):
    with (
        server(f"ipc://{place}/a") as (a, first),
        server(f"ipc://{place}/b") as (b, _),
        attached(f"{a},{b}", timeouts=PATIENT) as llm,
    ):
        before = epoch(llm)
        stream = llm.stream(PROMPT, PARAMS)
        for number, _ in enumerate(stream):
            if number == 1:
                first.send_signal(signal.SIGKILL)
                first.wait()
        assert stream.completion.token_ids == plain
        faults.wait_for(lambda: epoch(llm) != before)
        faults.wait_until_healthy(llm)
        count = drafted(llm)
        assert said(llm) == plain
        assert drafted(llm) > count


def test_a_next_server_with_another_vocabulary_is_not_taken_for_the_first(place, plain, faults):
    with (
        server(f"ipc://{place}/a") as (a, first),
        server(f"ipc://{place}/b", speculator="vocabulary=300") as (b, _),
        attached(f"{a},{b}", timeouts=PATIENT, recovery=SELDOM) as llm,
    ):
        first.send_signal(signal.SIGKILL)
        faults.wait_for(lambda: "speculator" in llm.coordinator._lanes.supervisor.given_up)
        assert "vocabularies differ" in llm.coordinator.lanes[1].down_because
        assert said(llm) == plain


# ---------------------------------------------------------------- clients that are none


class Stranger:
    """A client that says what the test has it say."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, b"\xff" + uuid.uuid4().hex.encode())
        self._socket.connect(address)

    def say(self, *orders) -> None:
        for order in orders:
            self._socket.send(order if isinstance(order, bytes) else codec.encode(order))

    def hear(self):
        """The next fact; None for a goodbye."""
        assert self._socket.poll(30_000)
        frame = self._socket.recv()
        return codec.decode_fact(frame) if frame else None

    def hear_of(self, kind: type):
        while not isinstance(fact := self.hear(), kind):
            assert fact is not None
        return fact

    def attach(self, version: int = WIRE_VERSION) -> None:
        self.say(Attach("e", version, "stranger"))

    def serve(self) -> None:
        """Come so far that drafts may be asked for."""
        self.attach()
        self.say(Configure("e", SPEC), Profile("e"))
        room = self.hear_of(codec.FACTS["Profiled"]).profile.max_kv_tokens
        self.say(Allocate("e", room))
        self.hear_of(codec.FACTS["Ready"])

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def stranger(address: str):
    client = Stranger(address)
    try:
        yield client
    finally:
        client.say(b"")
        client.close()


def opened(seq: int, tokens=(1, 2, 3)) -> OpenedSequence:
    return OpenedSequence(seq, 0, list(tokens), 1, GREEDY)


def item(seq: int, base_len: int, since=(), k: int = 2) -> DraftItem:
    return DraftItem(seq, 0, base_len, list(since), k)


NONSENSE = {
    "its memory": ([Unmap("e", ["a"])], "protocol", "Unmap is no order for a server"),
    "no message": ([b"\xc1garbage"], "protocol", "malformed frame"),
    "a map": ([b"\x81\x01\x02"], "protocol", "malformed frame"),
    "another epoch": ([Profile("other")], "protocol", "order for epoch other"),
    "out of turn": ([Profile("e")], "protocol", "Profile is not legal in state idle"),
    "two orders": (
        [Open("e", [opened(0)]), Draft("e", 1, [item(0, 3)]), Draft("e", 2, [item(0, 3)])],
        "protocol",
        "Draft is not legal in state busy",
    ),
    "of another": ([Draft("e", 1, [item(0, 3)])], "protocol", "is not open"),
    "closes another": ([Close("e", [0])], "protocol", "sequence 0 is not open"),
    "no token": ([Open("e", [opened(0, [256])])], "protocol", "not in the vocabulary of 256"),
    "no history": ([Open("e", [opened(0)]), Draft("e", 1, [item(0, 9)])], "protocol", "but 3 are held"),
    "too long": ([Open("e", [opened(0, [1] * 40_000)])], "memory", "longer than 4096 tokens"),
    "too many": ([Open("e", [opened(seq) for seq in range(9)])], "memory", "more than 8 sequences"),
    "flood": (
        [message for _ in range(200) for message in (Open("e", [opened(0)]), Close("e", [0]))],
        "memory",
        "frames since its last answer",
    ),
}


def test_nonsense_of_one_client_ends_its_own_session_only(place, plain, faults):
    with (
        server(f"ipc://{place}/s", clients=2) as (address, process),
        attached(address, timeouts=PATIENT) as llm,
        undisturbed(llm, plain, faults),
    ):
        (lane,) = psutil.Process(process.pid).children()
        for name, (orders, kind, reason) in NONSENSE.items():
            with stranger(address) as client:
                client.serve()
                client.say(*orders)
                failed = client.hear_of(Failed)
                assert (failed.kind, reason in failed.message) == (kind, True), (name, failed)
        assert lane.is_running()


def test_a_flood_of_one_who_is_no_client_is_no_matter_to_the_others(place, plain, faults):
    with (
        server(f"ipc://{place}/s") as (address, _),
        attached(address, timeouts=PATIENT) as llm,
        stranger(address) as client,
        undisturbed(llm, plain, faults),
    ):
        client._socket.setsockopt(zmq.SNDHWM, 0)
        for _ in range(20_000):
            client.say(b"\xc1" * 100)
        client.attach()
        client.hear()


def test_one_who_takes_nothing_in_is_dropped(place, plain, faults):
    with (
        server(f"ipc://{place}/s", clients=2) as (address, _),
        attached(address, timeouts=PATIENT) as llm,
        undisturbed(llm, plain, faults),
    ):
        with stranger(address) as client:
            client.serve()
        faults.wait_for(lambda: attaches(address))


def test_who_speaks_another_version_is_told_which_this_is(place):
    with server(f"ipc://{place}/s") as (address, _), stranger(address) as client:
        client.attach(version=1)
        assert client.hear().wire_version == WIRE_VERSION
        client.say(Configure("e", SPEC))
        client.attach()
        assert client.hear().wire_version == WIRE_VERSION
