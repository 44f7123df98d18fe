"""The MPS daemon's text protocol, spoken with a stand-in that can misbehave."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from executor import mps
from executor.launch.mps_watch import sweep
from executor.mps import MpsControl, MpsFailed, Parting

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIVER = Path(__file__).resolve().parents[1] / "launcher" / "fake_driver"
CLIENT = "import time, sys; sys.stdout.write('up'); sys.stdout.flush(); time.sleep(100)"


@pytest.fixture
def environment(tmp_path, monkeypatch) -> dict[str, str]:
    """Of a daemon and its clients; the stand-in is on the PATH."""
    variables = mps.directories(tmp_path / "mps")
    for path in variables.values():
        Path(path).mkdir(parents=True)
    monkeypatch.setenv("PATH", f"{DRIVER}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_MPS", str(tmp_path))
    return variables


@pytest.fixture
def daemon(environment) -> Iterator[subprocess.Popen[bytes]]:
    variables = os.environ | environment | {"CUDA_VISIBLE_DEVICES": "GPU-1"}
    with subprocess.Popen(mps.DAEMON, env=variables) as process:
        deadline = time.monotonic() + 30
        while not (Path(environment[mps.PIPE_VARIABLE]) / mps.CONTROL).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield process
        process.kill()


@pytest.fixture
def client(environment) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a lane of this daemon."""
    command = [sys.executable, "-c", CLIENT, "workers"]
    with subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(2) == b"up"
        yield process
        process.kill()


def asked(tmp_path) -> list[str]:
    return [line.partition(" ")[2] for line in (tmp_path / "asked").read_text().splitlines()]


def test_a_client_is_known_and_can_be_terminated(environment, daemon, client, tmp_path):
    control = MpsControl(environment)
    assert control.clients() == {client.pid: 4242}
    assert control.faulty() == []
    assert control.terminate(client.pid)
    assert not control.terminate(os.getpid())
    assert f"terminate_client 4242 {client.pid}" in asked(tmp_path)
    control.quit(3.2)
    assert asked(tmp_path)[-1] == "quit -t 3"
    assert daemon.wait(30) == 0


def test_what_a_killed_launcher_left_is_quit(environment, daemon):
    sweep(Path(environment[mps.PIPE_VARIABLE]).parent)
    assert daemon.wait(30) == 0
    sweep(Path(environment[mps.PIPE_VARIABLE]).parent)  # there is none any more


def test_without_clients_there_is_no_server(environment, daemon):
    assert MpsControl(environment).servers() == []
    assert MpsControl(environment).clients() == {}


def test_a_fault_is_seen(environment, daemon, client, tmp_path):
    (tmp_path / "fault").touch()
    assert MpsControl(environment).faulty() == [4242]


def test_a_daemon_that_is_not_there_is_an_error(environment):
    with pytest.raises(MpsFailed, match="refused 'get_server_list': Cannot find MPS control daemon process"):
        MpsControl(environment).servers()


def test_a_daemon_that_hangs_is_an_error(environment, daemon, tmp_path):
    (tmp_path / "hung").touch()
    with pytest.raises(MpsFailed, match=r"gave no answer to 'get_server_list' within 0\.5 s"):
        MpsControl(environment, 0.5).servers()


def test_an_answer_that_is_none_is_an_error(environment, daemon):
    with pytest.raises(MpsFailed, match="answered 'nonsense' with 'Unknown command nonsense'"):
        MpsControl(environment)._numbers("nonsense")


def test_without_the_program_there_is_a_clear_error(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsFailed, match="nvidia-cuda-mps-control cannot be run: No such file"):
        MpsControl(environment).servers()


@pytest.mark.parametrize("mood", ["", "hung", "unlisted"])
def test_a_client_is_killed_only_after_the_daemon_was_asked(environment, daemon, client, tmp_path, mood):
    if mood:
        (tmp_path / mood).touch()
    parting = mps.parting(environment, client.pid, client.send_signal)
    parting.then(signal.SIGTERM)
    assert client.wait(30) == -signal.SIGTERM
    if mood != "hung":
        assert (f"terminate_client 4242 {client.pid}" in asked(tmp_path)) == (mood == "")
    parting.then(signal.SIGKILL)  # it is gone: at once, and to nobody
    parting.close()


def test_signals_come_in_their_order_after_the_question(environment):
    sent: list[signal.Signals] = []
    parting = Parting(MpsControl(environment), 1, sent.append)
    parting.then(signal.SIGABRT)
    parting.then(signal.SIGKILL)
    parting.close()
    assert sent == [signal.SIGABRT, signal.SIGKILL]


def test_who_is_no_client_is_killed_as_ever():
    assert mps.parting({"A": "1"}, 1, lambda number: None) is None


def test_a_share_is_what_the_driver_reads():
    assert mps.share(None, None, below_normal=False) == {}
    assert mps.share(30, 4 * 10**9, below_normal=True) == {
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3814M",
        "CUDA_MPS_CLIENT_PRIORITY": "1",
    }
