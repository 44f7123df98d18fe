"""The launcher's parts, one by one: directories, ear, tether, and the table of a process's states."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from executor.errors import InvalidConfig, SpeclaneError
from executor.launch import tether
from executor.launch.child import CHILD_TABLE, Child, Event, State
from executor.launch.ear import Ear
from executor.launch.places import PrivateDirectory, StateDirectory, directory_of, state_directory
from executor.launch.plan import PlannedProcess
from executor.restart import RestartPolicy
from ipc.errors import ProtocolError

CHILD = """
import signal, sys, time
def told(*_):
    open({said!r}, "a").write("TERM")
    sys.exit()
signal.signal(signal.SIGTERM, told)
open({said!r}, "w").write("up ")
time.sleep(100)
"""


def test_a_directory_is_one_launchers_at_a_time(tmp_path):
    path = tmp_path / "speclane.launch.x"
    first = PrivateDirectory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(SpeclaneError, match=r"runs already \(its lock is .*\); end it, or change `name`"):
        PrivateDirectory(path)
    (path / "mps-a").mkdir()
    (path / "mps-a" / "control").touch()
    (path / "notify").touch()
    assert [left.name for left in first.leftovers()] == ["mps-a", "notify"]
    first.clear()
    assert first.leftovers() == []
    first.remove()
    assert not path.exists()


def test_what_a_killed_launcher_left_is_taken_over(tmp_path):
    path = tmp_path / "x"
    path.mkdir(mode=0o755)
    (path / "lock").touch()
    taken = PrivateDirectory(path)
    assert path.stat().st_mode & 0o777 == 0o700
    taken.remove()


def test_what_is_no_directory_of_ours_is_refused(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path)
    for name in ("file", "link"):
        with pytest.raises(SpeclaneError, match="somebody else's; set XDG_RUNTIME_DIR"):
            PrivateDirectory(tmp_path / name)
    with pytest.raises(InvalidConfig, match="No such file or directory"):
        PrivateDirectory(tmp_path / "no" / "where")


def test_where_things_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert directory_of("x") == tmp_path / "speclane.launch.x"
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/speclane:/other")
    assert state_directory(None, "x") == Path("/var/lib/speclane/x")
    assert state_directory("/given", "x") == Path("/given")
    monkeypatch.delenv("STATE_DIRECTORY")
    assert state_directory(None, "x").name == "x"


def test_a_status_is_written_at_once_or_not_at_all(tmp_path):
    kept = StateDirectory(tmp_path / "state")
    kept.write({"state": "healthy"})
    kept.close()
    assert json.loads(kept.status_file.read_text()) == {"state": "healthy"}
    assert [entry.name for entry in sorted(kept.path.iterdir())] == ["logs", "status.json"]
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match=r"cannot be written: Not a directory; try --state ./state"):
        StateDirectory(tmp_path / "file")


def test_a_state_directory_is_one_launchers_at_a_time(tmp_path):
    first = StateDirectory(tmp_path / "state")
    first.write({"pid": 1})
    with pytest.raises(
        InvalidConfig, match=r"state is that of another launch, which runs; try --state /.*state-2"
    ):
        StateDirectory(tmp_path / "state")
    assert json.loads(first.status_file.read_text()) == {"pid": 1}
    first.close()
    StateDirectory(tmp_path / "state").close()


def test_who_speaks_is_known_by_the_kernel(tmp_path):
    ear = Ear(tmp_path / "notify")
    assert ear.hear() is None
    script = f"import socket; s = socket.socket(1, 2); s.sendto(b'READY=1', {str(ear.path)!r})"
    with subprocess.Popen([sys.executable, "-c", script]) as speaker:
        assert speaker.wait(30) == 0
    heard = ear.hear()
    assert heard == (speaker.pid, {"READY": "1"})
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
        own.sendto(b"A=b", str(ear.path))
    assert ear.hear() == (os.getpid(), {"A": "b"})
    ear.close()
    assert not ear.path.exists()


def test_a_program_on_a_tether_ends_with_whoever_started_it(tmp_path):
    """The parent is killed; the child, which knows nothing of this, gets SIGTERM."""
    said = tmp_path / "said"
    child = tmp_path / "child.py"
    child.write_text(CHILD.format(said=str(said)))
    tied, mine = [sys.executable, tether.__file__], [sys.executable, str(child)]
    parent = f"import os, subprocess, time; subprocess.Popen([*{tied}, str(os.getpid()), *{mine}])"
    with subprocess.Popen([sys.executable, "-c", parent + "; time.sleep(100)"]) as process:
        wait_for(lambda: said.exists() and said.read_text() == "up ")
        process.kill()
    wait_for(lambda: said.read_text() == "up TERM")


def test_a_program_that_is_not_there_is_told(tmp_path):
    words = [sys.executable, tether.__file__, str(os.getpid()), "no-such-program"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (
        127,
        "no-such-program cannot be run: No such file or directory\n",
    )
    words[2] = "1"  # a parent that is none: it has ended already
    assert subprocess.run(words, timeout=30, check=False).returncode == 1


def test_a_child_over_its_incarnations(tmp_path):
    plan = PlannedProcess(
        name="x",
        kind="target",
        argv=(
            sys.executable,
            "-c",
            "import os; print('said', os.environ['A'], 'NOTIFY_SOCKET' in os.environ)",
        ),
        environment={"A": "1"},
    )
    child = Child(plan, RestartPolicy(), tmp_path / "x.log")
    for start in (1, 2):
        child.start(child.plan.argv, {})
        assert (child.state, child.starts) == (State.STARTING, start)
        wait_for(lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        assert child.reap() == "exited with status 0"
        child.step(Event.DIED)
        assert child.last_line() == "said 1 False"
    assert child.log.read_text().count("--- ") == 2
    assert child.pid is None
    child.signal(signal.SIGKILL)  # to nobody
    child.step(Event.STOP)
    assert child.state is State.STOPPED


def test_a_log_that_is_too_long_is_put_aside(tmp_path, monkeypatch):
    monkeypatch.setattr("executor.launch.child._LOG_BYTES", 10)
    log = tmp_path / "x.log"
    log.write_text("x" * 11)
    child = Child(PlannedProcess(name="x", kind="target", argv=("true",)), RestartPolicy(), log)
    child.start(child.plan.argv, {})
    wait_for(lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    child.reap()
    assert (tmp_path / "x.log.1").read_text() == "x" * 11
    assert log.read_text().startswith("--- ")
    assert child.last_line() == ""


def test_a_child_that_cannot_be_watched_is_not_left_behind(tmp_path, monkeypatch):
    started: list[int] = []

    def none_left(pid: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", none_left)
    plan = PlannedProcess(name="x", kind="target", argv=("sleep", "100"))
    child = Child(plan, RestartPolicy(), tmp_path / "x.log")
    with pytest.raises(OSError, match="Too many open files"):
        child.start(plan.argv, {})
    assert (child.pid, child.state, child.starts) == (None, State.WAITING, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


def test_a_log_that_is_gone_has_no_last_line(tmp_path):
    child = Child(PlannedProcess(name="x", kind="target", argv=("x",)), RestartPolicy(), tmp_path / "no.log")
    assert child.last_line() == ""


@pytest.mark.parametrize("state", list(State))
def test_whatever_it_does_a_process_can_be_stopped(state):
    stopped = CHILD_TABLE.step(state, Event.STOP)
    assert stopped in (State.STOPPING, State.STOPPED, State.FAILED)
    assert (stopped is State.STOPPING) == (
        state in (State.STARTING, State.READY, State.ENDING, State.STOPPING)
    )


def test_what_is_no_row_is_an_error():
    with pytest.raises(ProtocolError, match="process: started is not legal in state ready"):
        CHILD_TABLE.step(State.READY, Event.STARTED)


def wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
