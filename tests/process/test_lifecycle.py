"""Start and stop: what comes up goes down whole, and what cannot come up says why in one line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from executor import LLM, Closed, InvalidConfig, LaneFailed, SamplingParams, Timeouts
from executor.lane import LaneState
from executor.process import WorkerProcess, describe_exit
from executor.rundir import RunDir

SHORT = SamplingParams(max_tokens=3, seed=1)


def toys(**options: Any) -> LLM:
    return LLM(**({"engine": "toy", "speculator": "ngram", "threads": 1} | options))


@pytest.mark.parametrize("count", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_starts_and_stops(count):
    """The leak check of this directory counts what is left."""
    for _ in range(count):
        with toys() as llm:
            llm.generate("x", SHORT)


def test_a_start_that_is_never_used():
    with toys():
        pass


def test_nothing_is_started_before_the_first_use():
    llm = toys()
    assert not psutil.Process().children()
    with pytest.raises(Closed, match="not been started"):
        _ = llm.coordinator
    llm.close()
    llm.close()


def test_a_closed_executor_says_so():
    with toys() as llm:
        open_stream = llm.stream("x", SamplingParams(max_tokens=4000))
        waiting = [llm.stream("x", SamplingParams(max_tokens=4000)) for _ in range(20)]
    for stream in (open_stream, *waiting):
        with pytest.raises(Closed, match="closed"):
            list(stream)
        with pytest.raises(Closed):  # not a wait for ever
            list(stream)
    for use in (lambda: llm.generate("x"), lambda: llm.stream("x"), llm.start):
        with pytest.raises(Closed, match="make a new one"):
            use()
    llm.close()


def test_closing_from_another_thread_ends_a_generation():
    llm = toys(target="vocabulary=256,step_ms=20")
    deltas = iter(llm.stream("x", SamplingParams(max_tokens=4000)))
    next(deltas)
    closer = threading.Thread(target=llm.close)
    closer.start()
    with pytest.raises(Closed):
        list(deltas)
    closer.join()


def test_closing_while_it_starts():
    llm = toys()
    heard: list[str] = []

    def start() -> None:
        try:
            llm.start()
        except Closed as closed:
            heard.append(str(closed))

    starter = threading.Thread(target=start)
    starter.start()
    llm.close()
    starter.join()
    # Closed before it had begun, while it was starting, or just after.
    assert heard in ([], ["the executor was closed"], ["the executor was closed; make a new one"])
    assert not psutil.Process().children()


def test_workers_stop_by_themselves_when_told():
    """No signal is needed: both exit with status 0 well within the limit."""
    with toys(timeouts=Timeouts(stop=60.0)) as llm:
        workers = [psutil.Process(lane.process.pid) for lane in llm.coordinator.lanes if lane.process]
        began = time.monotonic()
    assert time.monotonic() - began < 30.0
    assert len(workers) == 2
    assert not any(worker.is_running() for worker in workers)
    assert [lane.state for lane in llm.coordinator.lanes] == [LaneState.DOWN] * 2


@pytest.mark.parametrize(
    ("options", "lane", "says"),
    [
        ({"target": "vocabulary=256,orbit=3"}, "target", "a toy has no parameter 'orbit'"),
        (
            {"target": "vocabulary=256,order=0"},
            "target",
            "toy parameter order must be a whole number of at least 1",
        ),
        (
            {"speculator": "vocabulary=256,agree=7"},
            "speculator",
            "toy parameter agree must be a number from 0 to 1",
        ),
    ],
)
def test_a_worker_that_refuses_its_model(options, lane, says):
    with pytest.raises(InvalidConfig, match=says) as refusal:
        toys(**options).start()
    assert refusal.value.field == lane
    assert "\n" not in str(refusal.value)


def test_a_start_that_takes_too_long():
    with pytest.raises(LaneFailed, match="not ready in time, in phase start"):
        toys(timeouts=Timeouts(load=0.001)).start()


def test_the_socket_path_is_too_long(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    with pytest.raises(InvalidConfig, match="longer than 107 bytes; set XDG_RUNTIME_DIR") as refusal:
        toys().start()
    assert refusal.value.field == "XDG_RUNTIME_DIR"
    assert list(deep.iterdir()) == []


def test_no_place_for_the_socket(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    with pytest.raises(InvalidConfig, match=r"no socket directory can be made in .*missing.*such as /tmp"):
        toys().start()


@pytest.mark.parametrize("left", [0, 1, 3, 12, 40, 63, 64])
def test_few_open_files_are_left(runtime_directory, left):
    """libzmq would abort the process if it could not open one, so that must never be tried."""
    program = (
        "import os, resource, sys\n"
        "from executor import LLM, SamplingParams, SpeclaneError\n"
        "llm = LLM(engine='toy', speculator='ngram')\n"
        "used = len(os.listdir('/proc/self/fd')) - 1\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (used + int(sys.argv[1]), 4096))\n"
        "try:\n"
        "    with llm: print(len(llm.generate('x', SamplingParams(max_tokens=3))[0].token_ids))\n"
        "except SpeclaneError as error: print(error)\n"
    )
    command = [sys.executable, "-c", program, str(left)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout == "3\n" if left == 64 else done.stdout.startswith("Too many open files: fewer than 64")
    )
    assert list(runtime_directory.iterdir()) == []


def test_an_executor_whose_starter_thread_has_ended_keeps_its_workers():
    """A worker's parent-death signal hangs on the thread that spawned it."""
    llm = toys(speculator="vocabulary=256,agree=0.9")
    starter = threading.Thread(target=llm.start)
    starter.start()
    starter.join()
    assert len(llm.generate(["a", "b"], SHORT)) == 2
    assert all(lane.serving for lane in llm.coordinator.lanes)
    llm.close()


def test_an_interrupt_at_the_terminal_is_not_the_workers_business():
    with toys(speculator="vocabulary=256,agree=0.9") as llm:
        for lane in llm.coordinator.lanes:
            assert lane.process is not None
            assert os.getsid(lane.process.pid) == lane.process.pid
            lane.process.kill(signal.SIGINT)
        assert llm.generate("x", SHORT)
        assert all(lane.serving for lane in llm.coordinator.lanes)


def test_a_program_that_forgets_to_close(runtime_directory):
    program = (
        "from executor import LLM, SamplingParams\n"
        "llm = LLM(engine='toy', speculator='ngram')\n"
        "print(len(llm.generate('x', SamplingParams(max_tokens=3))[0].token_ids))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
    assert list(runtime_directory.iterdir()) == []


class TestRunDir:
    def test_private_and_gone_afterwards(self):
        rundir = RunDir()
        assert rundir.path.stat().st_mode & 0o777 == 0o700
        rundir.remove()
        assert not rundir.path.exists()

    def test_a_dead_owners_directory_is_swept_and_a_living_ones_is_not(self, runtime_directory):
        dead = runtime_directory / "speclane-dead"
        dead.mkdir(mode=0o700)
        (dead / "lock").touch()
        (dead / "hub").touch()
        living = RunDir()
        another = RunDir()
        assert not dead.exists()
        assert living.path.exists()
        living.remove()
        another.remove()

    @pytest.mark.parametrize(("mode", "contents"), [(0o700, "thesis.txt"), (0o755, "hub")])
    def test_what_is_no_run_directory_is_left_alone(self, runtime_directory, mode, contents):
        stranger = runtime_directory / "speclane-notes"
        stranger.mkdir()
        stranger.chmod(mode)
        (stranger / "lock").touch()
        (stranger / contents).touch()
        RunDir().remove()
        assert sorted(path.name for path in stranger.iterdir()) == sorted(["lock", contents])
        shutil.rmtree(stranger)

    def test_a_directory_that_is_just_being_made_is_left_alone(self, runtime_directory):
        young = runtime_directory / "speclane-young"
        young.mkdir()
        RunDir().remove()
        assert young.exists()
        young.rmdir()

    def test_a_directory_swept_before_it_was_locked_is_made_anew(self, monkeypatch):
        import fcntl

        swept = []

        def flock(fd: int, how: int) -> None:
            if not swept:
                swept.append(os.readlink(f"/proc/self/fd/{fd}"))
                os.unlink(swept[0])
                os.rmdir(os.path.dirname(swept[0]))
            real(fd, how)

        real = fcntl.flock
        monkeypatch.setattr(fcntl, "flock", flock)
        rundir = RunDir()
        assert (rundir.path / "lock").exists()
        assert str(rundir.path) != os.path.dirname(swept[0])
        rundir.remove()


class TestWorkerProcess:
    def test_exit_texts(self):
        assert describe_exit(0) == "exited with status 0"
        assert describe_exit(-9) == "killed by SIGKILL"
        assert describe_exit(-99) == "killed by signal 99"

    def test_no_process_is_left_without_a_pidfd(self, monkeypatch):
        def refuse(pid: int) -> int:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(os, "pidfd_open", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            WorkerProcess("target", "e", "ipc:///nowhere", 1)
        with pytest.raises(LaneFailed, match=r"its process cannot be started: .*Too many open files"):
            toys().start()

    def test_no_interpreter(self, monkeypatch):
        monkeypatch.setattr("executor.process.command", lambda *_: ["/nowhere/python"])
        with pytest.raises(LaneFailed, match="target lane failed: its process cannot be started"):
            toys().start()

    def test_no_thread(self, monkeypatch):
        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        llm = toys()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(Exception, match="no thread for the coordinator"):
            llm.start()
