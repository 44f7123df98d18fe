"""The control socket of a running executor: what it answers, whom it refuses, and that nobody holds it up."""

from __future__ import annotations

import json
import os
import pickle
import resource
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import astuple
from typing import TYPE_CHECKING

import msgspec
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from executor import (
    LLM,
    Closed,
    InvalidConfig,
    LaneFailed,
    Recovery,
    SamplingParams,
    SpeclaneError,
    control,
    process,
)
from executor import control_client as client
from executor.cli.complaint import complaint
from executor.cli.swap_speculator import from_anywhere
from executor.control import ControlServer
from executor.control_wire import (
    HEADER,
    MAX_REQUEST_BYTES,
    Reported,
    ReportStatus,
    Swapped,
    SwapSpeculator,
    decode_reply,
    framed,
)
from executor.status import HealthStatus, LaneStatus, Status, Totals

if TYPE_CHECKING:
    from pathlib import Path

PARAMS = SamplingParams(max_tokens=60, temperature=0.9, seed=5)
DRAFT = "vocabulary=256,agree=0.8"
STATUS = Status(
    1,
    "ngram",
    HealthStatus("degraded", "a reason", 0.5),
    [LaneStatus("target", "serving", 2, "e", "toy", "m", 3, 0.25, 4)],
    Totals(*range(11)),
)


@pytest.fixture(autouse=True)
def apart(runtime_directory, monkeypatch):
    """Executors that run elsewhere on this machine are not seen."""
    monkeypatch.setenv("TMPDIR", str(runtime_directory))
    monkeypatch.setattr(tempfile, "tempdir", str(runtime_directory))


class Stub:
    """Something to control without lanes; a swap lasts until `gate` opens."""

    def __init__(self) -> None:
        self.speculation = "ngram"
        self.gate = threading.Event()
        self.swaps: list[tuple[str, float | None]] = []

    def status(self) -> Status:
        return STATUS

    def swap_speculator(self, model: str, timeout: float | None = None) -> None:
        self.swaps.append((model, timeout))
        assert self.gate.wait(30)
        self.speculation = model


@pytest.fixture
def stub():
    return Stub()


@pytest.fixture
def server(runtime_directory: Path, stub: Stub):
    """A server that listens as an executor would."""
    directory = runtime_directory / "speclane-stub"
    directory.mkdir(mode=0o700)
    made = ControlServer(directory, stub)
    yield made
    stub.gate.set()
    made.close()
    made.close()
    (directory / "control").unlink()
    directory.rmdir()


@pytest.fixture
def connect(runtime_directory: Path):
    """`connect()`: a client's end, closed after the test."""
    made: list[socket.socket] = []

    def connect() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        made.append(connection)
        connection.connect(str(runtime_directory / "speclane-stub" / "control"))
        connection.settimeout(30)
        return connection

    yield connect
    for connection in made:
        connection.close()


def answer(connection: socket.socket) -> bytes:
    """All that comes until the other end is closed; a reset counts as closed."""
    data = bytearray()
    try:
        while more := connection.recv(1 << 16):
            data += more
    except ConnectionResetError:
        pass
    return bytes(data)


def still_answers() -> bool:
    return client.status(client.choose(None)).status == STATUS


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


# ---------------------------------------------------------------- requests


def test_a_status_comes_back_as_it_is(server):
    assert client.find() == [client.choose(os.getpid())]
    reported = client.status(client.choose(None))
    assert (reported.status, astuple(server.dropped)) == (STATUS, (0, 0, 0))


def test_a_request_may_come_in_pieces(server, connect):
    connection = connect()
    for byte in framed(ReportStatus()):
        connection.sendall(bytes([byte]))
    assert isinstance(decode_reply(answer(connection)[HEADER.size :]), Reported)


def test_status_is_reported_while_a_swap_runs_and_a_second_swap_is_refused(server, stub, connect):
    swap = connect()
    swap.sendall(framed(SwapSpeculator("off", 7.0)))
    wait_for(lambda: stub.swaps)
    assert still_answers()
    with pytest.raises(SpeclaneError, match="another swap is under way"):
        client.swap_speculator(client.choose(None), "ngram", 7.0)
    stub.gate.set()
    assert decode_reply(answer(swap)[HEADER.size :]) == Swapped("off")
    assert stub.swaps == [("off", 7.0)]
    assert client.swap_speculator(client.choose(None), "ngram", 8.0) == "ngram"


def test_whoever_asks_for_a_swap_may_go(server, stub, connect):
    connection = connect()
    connection.sendall(framed(SwapSpeculator("off", None)))
    wait_for(lambda: stub.swaps)
    connection.close()
    wait_for(lambda: not server._connections)
    stub.gate.set()
    wait_for(lambda: stub.speculation == "off")
    assert still_answers()


@pytest.mark.parametrize(
    "error",
    [
        InvalidConfig("model", "model 'x' is nothing; try ngram"),
        LaneFailed("speculator", "killed by SIGKILL", "its last words"),
        Closed("the executor was closed"),
        SpeclaneError("something else"),
        InvalidConfig("model", "\udcff" + "long " * 5000),
    ],
)
def test_an_error_comes_back_as_what_it_was(server, stub, error):
    def fail(model: str, timeout: float | None = None) -> None:
        raise error

    stub.swap_speculator = fail
    with pytest.raises(type(error)) as raised:
        client.swap_speculator(client.choose(None), "x", 1.0)
    assert type(raised.value) is type(error)
    if len(str(error)) < 1000:
        assert complaint(raised.value) == complaint(error)


def test_a_defect_is_told_and_survived(server, stub):
    def fail() -> Status:
        raise KeyError("defect")

    stub.status = fail
    with pytest.raises(SpeclaneError, match="internal error: KeyError: 'defect'"):
        client.status(client.choose(None))
    del stub.status
    assert still_answers()


# ---------------------------------------------------------------- what is no request


def frame(body: bytes) -> bytes:
    return HEADER.pack(len(body)) + body


MALFORMED = {
    "cut in the length": b"\0\0",
    "cut in the body": framed(ReportStatus())[:-1],
    "empty": frame(b""),
    "a claim of 4 GB": b"\xff\xff\xff\xff" + b"x" * 100,
    "one byte over the cap": HEADER.pack(MAX_REQUEST_BYTES + 1),
    "more than was announced": framed(ReportStatus()) + b"x",
    "a long array": frame(b"\xdd\xff\xff\xff\xff"),
    "deep arrays": frame(b"\x91" * MAX_REQUEST_BYTES),
    "deep long arrays": frame(b"\xdd\x00\x00\x20\x00" * (MAX_REQUEST_BYTES // 5)),
    "empty maps": frame(b"\xdc\x1f\x00" + b"\x80" * 7936),
    "a huge map": frame(b"\xdf\xff\xff\xff\xff"),
    "an ext type": frame(b"\xc7\x04\x01abcd"),
    "a pickle": frame(pickle.dumps({"model": "off"})),
    "bytes for a model": frame(msgspec.msgpack.encode(["SwapSpeculator", b"off", None])),
    "a number for a model": frame(msgspec.msgpack.encode(["SwapSpeculator", 7, None])),
    "text for seconds": frame(msgspec.msgpack.encode(["SwapSpeculator", "off", "1"])),
    "a field too many": frame(msgspec.msgpack.encode(["ReportStatus", 1])),
    "a reply": framed(Swapped("off")),
    "an unknown request": frame(msgspec.msgpack.encode(["Stop"])),
    "no array": frame(msgspec.msgpack.encode("ReportStatus")),
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_request_is_dropped_and_counted(server, stub, connect, data):
    connection = connect()
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    assert answer(connection) == b""
    assert astuple(server.dropped) == (0, 1, 0)
    assert stub.swaps == []
    assert still_answers()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=64), st.booleans())
def test_noise_is_dropped(server, stub, connect, noise, with_length):
    connection = connect()
    connection.sendall(frame(noise) if with_length else noise)
    connection.shutdown(socket.SHUT_WR)
    assert answer(connection) == b"" or noise == framed(ReportStatus())[HEADER.size :]
    connection.close()
    assert stub.swaps == []


def test_memory_stays_bounded(server, connect):
    """A thousand of the costliest requests."""
    process = psutil.Process()
    costly = [
        MALFORMED[kind] for kind in ("deep long arrays", "empty maps", "a claim of 4 GB", "deep arrays")
    ]

    def flood(rounds: int) -> None:
        for _ in range(rounds):
            for data in costly:
                connection = connect()
                connection.sendall(data)
                assert answer(connection) == b""
                connection.close()

    flood(10)
    before = process.memory_info().rss
    flood(240)
    assert process.memory_info().rss - before < 16 << 20


# ---------------------------------------------------------------- who holds up whom


def test_silent_clients_hold_nothing_up(server, connect, monkeypatch):
    monkeypatch.setattr(control, "CLIENT_SECONDS", 0.3)
    silent = [connect() for _ in range(control.MAX_CONNECTIONS + 4)]
    silent[0].sendall(b"\0")
    assert still_answers()
    assert [answer(connection) for connection in silent] == [b""] * len(silent)
    assert server.dropped.late == len(silent)


def test_a_client_that_reads_nothing_is_dropped(server, stub, connect, monkeypatch):
    """Its reply does not fit into the socket's buffer."""
    monkeypatch.setattr(control, "CLIENT_SECONDS", 0.3)
    lane = LaneStatus("target", "serving", 2, "e", "toy", "m" * (1 << 21), 3, 0.25, 4)
    stub.status = lambda: msgspec.structs.replace(STATUS, lanes=[lane])
    connection = connect()
    connection.sendall(framed(ReportStatus()))
    wait_for(lambda: server.dropped.late == 1)
    del stub.status
    assert still_answers()


def test_without_descriptors_it_is_deaf_for_a_while_and_does_not_spin(server, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    connection = socket.socket(socket.AF_UNIX)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
        connection.connect(server._listener.getsockname())
        wait_for(lambda: caplog.records)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connection.settimeout(30)
    connection.sendall(framed(ReportStatus()))
    assert isinstance(decode_reply(answer(connection)[HEADER.size :]), Reported)
    connection.close()
    assert [r.getMessage() for r in caplog.records] == [
        'event=control_deaf reason="Too many open files"'
    ] * len(caplog.records)
    assert len(caplog.records) <= 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_other_users_are_refused_and_counted(server, runtime_directory):
    """Even where the directory's mode would let them in."""
    directory = runtime_directory / "speclane-stub"
    assert directory.stat().st_mode & 0o777 == 0o700
    program = (
        "import os, socket, sys\n"
        "connection = socket.socket(socket.AF_UNIX)\n"
        "connection.settimeout(30)\n"
        "os.setuid(65534)\n"
        "connection.connect(sys.argv[1])\n"
        "try: print(connection.recv(10))\n"
        "except ConnectionResetError: print(b'')\n"
    )
    modes = {path: path.stat().st_mode for path in (runtime_directory, directory, directory / "control")}
    try:
        for path in modes:
            path.chmod(0o777)
        command = [sys.executable, "-c", program, str(directory / "control")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    finally:
        for path, mode in modes.items():
            path.chmod(mode)
    assert (done.stdout, done.stderr) == ("b''\n", "")
    assert server.dropped.strangers == 1
    assert still_answers()


# ---------------------------------------------------------------- finding


def test_none_runs(runtime_directory):
    with pytest.raises(SpeclaneError, match="no executor of yours is running") as refusal:
        client.choose(None)
    assert str(runtime_directory) in str(refusal.value)


def test_the_socket_of_a_dead_executor_is_passed_over(server, runtime_directory):
    directory = runtime_directory / "speclane-dead"
    directory.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "control"))
        dead.listen()
    assert still_answers()
    (directory / "control").unlink()
    directory.rmdir()


def test_which_one_must_be_said(server, runtime_directory, monkeypatch):
    one = client.choose(None)
    with pytest.raises(InvalidConfig, match=f"pid 1 is no executor of yours; running: {one.pid}"):
        client.choose(1)
    several = [one, client.Found(7, one.path)]
    monkeypatch.setattr(client, "find", lambda: several)
    assert client.choose(7).pid == 7
    with pytest.raises(InvalidConfig, match=f"several are running: {one.pid}, 7") as refusal:
        client.choose(None)
    assert refusal.value.field == "pid"
    several[1] = client.Found(one.pid, one.path)
    with pytest.raises(InvalidConfig, match=f"pid {one.pid} runs 2 executors"):
        client.choose(one.pid)


def test_one_that_answers_nothing_is_given_up(server, stub, monkeypatch):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.2)
    blocked = threading.Event()
    stub.status = lambda: (blocked.wait(30), STATUS)[1]
    with pytest.raises(SpeclaneError, match=f"executor {os.getpid()} gave no answer within 0.2 s"):
        client.status(client.choose(None))
    blocked.set()


# ---------------------------------------------------------------- a real executor


def toys(**options) -> LLM:
    return LLM(**{"engine": "toy", "speculator": DRAFT, "threads": 1} | options)


def test_the_status_of_a_real_one():
    with toys() as llm:
        llm.generate("hello", PARAMS)
        status = client.status(client.choose(os.getpid())).status
        own = llm.status()
        assert [
            (lane.lane, lane.state, lane.pid, lane.epoch, lane.model, lane.restarts, lane.orders)
            for lane in status.lanes
        ] == [
            (lane.name, "serving", lane.process.pid, lane.epoch, lane.spec.model, 0, lane.orders)
            for lane in llm.coordinator.lanes
        ]
        assert all(0 < lane.busy_share < 1 for lane in status.lanes)
        assert (status.pid, status.speculation, status.health.state) == (os.getpid(), DRAFT, "healthy")
        assert status.totals == own.totals
        assert status.totals.tokens == 60
        directory = llm.coordinator.directory
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    with pytest.raises(SpeclaneError, match="no executor"):
        client.choose(None)


def test_who_was_answered_may_swap_again_at_once(monkeypatch):
    run = ControlServer._run_swap

    def linger(*given):
        run(*given)
        time.sleep(0.2)

    monkeypatch.setattr(ControlServer, "_run_swap", linger)
    with toys() as llm:
        llm.generate("hello", SamplingParams(max_tokens=1))
        for model in ("off", "ngram"):
            assert client.swap_speculator(client.choose(None), model, 60.0) == model


def test_a_swap_under_load_changes_no_token():
    with toys(speculator="off") as llm:
        alone = llm.generate("hello", SamplingParams(max_tokens=1500, temperature=0.9, seed=5))[0].token_ids
    with toys() as llm:
        stream = llm.stream("hello", SamplingParams(max_tokens=1500, temperature=0.9, seed=5))
        tokens = []
        models = iter(["ngram", "off", "vocabulary=256,agree=0.95"])
        for delta in stream:
            tokens += delta.token_ids
            if len(tokens) > 100 and (model := next(models, None)) is not None:
                assert client.swap_speculator(client.choose(None), model, 60.0) == model
        assert tokens == alone
        assert llm.speculation == "vocabulary=256,agree=0.95"
        assert llm.coordinator.deaths == {"target": 0, "speculator": 0}
        assert [lane.spec.model for lane in llm.coordinator.lanes][1] == llm.speculation


@pytest.mark.parametrize(
    ("model", "seconds", "error", "text"),
    [
        ("vocabulary=9", 60.0, InvalidConfig, "vocabularies differ: target 256 tokens, speculator 9"),
        ("", 60.0, InvalidConfig, "model must be off, ngram or a model, got ''"),
        ("ngram", 0.0, InvalidConfig, "timeout must be a positive number of seconds, got 0"),
        ("ngram", float("nan"), InvalidConfig, "timeout must be a positive number of seconds, got nan"),
        ("ngram", 1e300, InvalidConfig, "timeout must be a positive number of seconds, got 1e[+]300"),
        ("ngram", 0.001, LaneFailed, "ngram does not serve after 0.001 s"),
    ],
)
def test_a_swap_that_cannot_be_leaves_all_as_it_was(model, seconds, error, text):
    with toys() as llm:
        lanes = llm.coordinator.lanes
        with pytest.raises(error, match=text):
            client.swap_speculator(client.choose(None), model, seconds)
        assert llm.speculation == DRAFT
        assert llm.coordinator.lanes == lanes
        completion = llm.generate("hello", PARAMS)[0]
        assert completion.acceptance_length > 1


def test_a_speculator_that_does_not_come_up_leaves_all_as_it_was(monkeypatch):
    real = process.command
    with toys() as llm:
        lanes = llm.coordinator.lanes
        last_words = [sys.executable, "-c", "import sys; sys.exit('no such weights')"]
        monkeypatch.setattr(process, "command", lambda *arguments: last_words)
        with pytest.raises(LaneFailed, match="speculator lane failed: exited with status 1") as failure:
            client.swap_speculator(client.choose(None), "vocabulary=256", 60.0)
        monkeypatch.setattr(process, "command", real)
        assert failure.value.stderr_tail == "no such weights"
        assert (llm.speculation, llm.coordinator.lanes) == (DRAFT, lanes)
        assert llm.generate("hello", PARAMS)[0].acceptance_length > 1


def test_a_swap_begins_what_has_not_begun_and_not_what_has_ended():
    llm = toys()
    try:
        llm.swap_speculator("off")
        assert (llm.speculation, len(llm.coordinator.lanes)) == ("off", 1)
    finally:
        llm.close()
    with pytest.raises(Closed):
        llm.swap_speculator("ngram")


def test_the_spare_is_swapped_too():
    """Or the next death would bring the one before back."""
    with toys(recovery=Recovery(standby=("speculator",))) as llm:
        supervisor = llm.coordinator._lanes.supervisor
        wait_for(lambda: supervisor._spares["speculator"].serving)
        spare = supervisor._spares["speculator"]
        llm.swap_speculator("ngram")
        wait_for(lambda: spare.process is None)
        wait_for(lambda: supervisor._spares["speculator"].serving)
        first = llm.coordinator.lanes[1]
        first.process.kill()
        wait_for(lambda: llm.coordinator.lanes[1] is not first and llm.coordinator.lanes[1].serving)
        assert llm.coordinator.lanes[1].spec.engine == "ngram"
        llm.swap_speculator("off")
        wait_for(lambda: len(supervisor._alive) == 1)


def test_whoever_waits_for_a_swap_hears_of_the_end(monkeypatch):
    heard: list[BaseException] = []
    with toys() as llm:
        begun = threading.Event()
        bring_in = llm.coordinator._lanes.supervisor.bring_in

        def slow(*arguments) -> None:
            bring_in(*arguments)
            begun.set()

        monkeypatch.setattr(llm.coordinator._lanes.supervisor, "bring_in", slow)

        def swap() -> None:
            try:
                client.swap_speculator(client.choose(None), "vocabulary=256,step_ms=1", 60.0)
            except SpeclaneError as error:
                heard.append(error)

        waiting = threading.Thread(target=swap)
        waiting.start()
        assert begun.wait(30)
        llm.close()
        waiting.join(30)
    assert [str(error) for error in heard] in (["the executor was closed"], [])


def test_a_run_directory_too_deep_for_the_socket_costs_only_the_control(
    monkeypatch, caplog, runtime_directory
):
    """The hub's name is shorter than the control socket's."""
    room = 107 - len("/speclane-12345678/hub") - len(str(runtime_directory)) - 1
    if room < 1:
        pytest.skip("the temporary directory's path is too long")
    base = runtime_directory / ("d" * room)
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    with toys() as llm:
        assert len(llm.generate("hello", PARAMS)[0].token_ids) == 60
    base.rmdir()
    assert 'event=control_unavailable reason="AF_UNIX path too long"' in caplog.messages


# ---------------------------------------------------------------- the command line


def test_a_directory_is_named_in_full(monkeypatch, runtime_directory):
    monkeypatch.chdir(runtime_directory)
    for name in ("draft", "ngram", "smollm2-135m"):
        os.mkdir(name)
    try:
        assert from_anywhere("draft") == str(runtime_directory.resolve() / "draft")
        for name in ("ngram", "off", "", "smollm2-135m", "organisation/name", "vocabulary=256"):
            assert from_anywhere(name) == name
    finally:
        for name in ("draft", "ngram", "smollm2-135m"):
            os.rmdir(name)


def speclane(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "executor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def test_the_commands_on_a_running_executor():
    with toys() as llm:
        pid = str(os.getpid())
        status, out, err = speclane("status", "--json", "--pid", pid)
        assert (status, err) == (0, "")
        seen = json.loads(out)
        assert [lane["pid"] for lane in seen["lanes"]] == [lane.process.pid for lane in llm.coordinator.lanes]
        assert seen["health"]["state"] == "healthy"
        assert seen["dropped"] == {"strangers": 0, "malformed": 0, "late": 0}

        assert speclane("swap-speculator", "ngram") == (0, "speculator: ngram\n", "")
        assert llm.speculation == "ngram"
        status, out, err = speclane("status")
        assert (status, err) == (0, "")
        lines = out.splitlines()
        assert lines[0].startswith(f"executor {pid} is healthy since ")
        assert [line.split()[:4] for line in lines[2:]] == [
            [lane.name, "serving", "pid", str(lane.process.pid)] for lane in llm.coordinator.lanes
        ]
        assert speclane("swap-speculator", "off") == (0, "speculator: off\n", "")
        refused = InvalidConfig("model", "model x/y: no such model; pass --model DIRECTORY")
        assert complaint(refused).line == "MODEL x/y: no such model; pass a DIRECTORY"
        status, out, err = speclane("swap-speculator", "vocabulary=9")
        assert (status, out) == (2, "")
        assert err.startswith("speclane: error: MODEL: vocabularies differ: ")


@pytest.mark.parametrize(
    ("arguments", "status", "line"),
    [
        (("status",), 1, "no executor of yours is running"),
        (("swap-speculator", "off"), 1, "no executor of yours is running"),
        (("swap-speculator",), 2, "Missing argument 'MODEL'"),
        (("swap-speculator", "off", "--load-timeout", "0"), 2, "--load-timeout must be a positive number"),
    ],
)
def test_the_commands_without_one(arguments, status, line):
    told = speclane(*arguments)
    assert told[:2] == (status, "")
    assert told[2].startswith(f"speclane: error: {line}")
    assert told[2].count("\n") == 1


def test_several_executors_are_named(runtime_directory):
    program = (
        "import sys\nfrom executor import LLM\n"
        "with LLM(engine='toy', speculator='off', threads=1):\n"
        "    print('up', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as one, subprocess.Popen(command, **pipes) as other:
        for process in (one, other):
            assert select.select([process.stdout], [], [], 60)[0]
            assert process.stdout.readline() == b"up\n"
        pids = ", ".join(str(pid) for pid in sorted((one.pid, other.pid)))
        told = speclane("status")
        assert told[:2] == (2, "")
        assert told[2].rstrip().endswith(f"several are running: {pids}")
        assert speclane("swap-speculator", "ngram", "--pid", str(one.pid)) == (0, "speculator: ngram\n", "")
        for process in (one, other):
            process.stdin.close()
    assert (one.returncode, other.returncode) == (0, 0)
