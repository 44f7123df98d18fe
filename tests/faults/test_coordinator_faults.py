"""Workers do not outlive their coordinator, whatever they do, and the next start clears up after it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from ipc.lifeline import Lifeline

SECONDS = 2.0

PROGRAM = """
import sys
from executor import LLM, SamplingParams
llm = LLM(engine="toy", speculator="vocabulary=256,agree=0.8", target="vocabulary=256,step_ms=5", threads=1)
stream = iter(llm.stream("x", SamplingParams(max_tokens=4000)))
next(stream)
print(*[lane.process.pid for lane in llm.coordinator.lanes], flush=True)
for _ in stream:
    pass
"""

SUSPENDED = """
import sys
from executor import LLM, Recovery, RestartPolicy, SamplingParams, Timeouts
llm = LLM(engine="toy", speculator="vocabulary=256,agree=0.8,step_ms=2", target="vocabulary=256,step_ms=20",
          threads=1, timeouts=Timeouts(draft=0.5, hang=1.0, verify=1.0))
with llm:
    for i, delta in enumerate(llm.stream("x", SamplingParams(max_tokens=80))):
        if i in (1, 10):
            print("running", flush=True)
            sys.stdin.readline()
    print(sum(llm.coordinator.deaths.values()), llm.coordinator.health.state)
"""

GUARDED = """
import ctypes, sys
from workers import guard
guard.die_with(int(sys.argv[1]), int(sys.argv[2]))
print("guarded", flush=True)
ctypes.PyDLL(None).sleep(60)  # as an extension would: in C, with the GIL held
"""


def gone_within(pidfd: int, seconds: float) -> bool:
    return bool(select.select([pidfd], [], [], seconds)[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_killed_coordinator_takes_its_workers_along(faults, undisturbed, runtime_directory, number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        pidfds = [os.pidfd_open(int(pid)) for pid in program.stdout.readline().split()]
        try:
            assert len(pidfds) == 2
            program.send_signal(number)
            assert all(gone_within(pidfd, SECONDS) for pidfd in pidfds)
        finally:
            for pidfd in pidfds:
                os.close(pidfd)
    assert program.returncode == -number
    assert len(list(runtime_directory.glob("speclane-*"))) == 1
    with faults.toys() as llm:
        assert len(list(runtime_directory.glob("speclane-*"))) == 1  # the dead one's was swept
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids


def test_a_suspended_coordinator_does_not_blame_its_lanes():
    """For longer than any of its limits nobody read what they said."""
    command = [sys.executable, "-c", SUSPENDED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        for _ in range(2):
            assert program.stdout.readline() == "running\n"
            program.stdin.write("\n")
            program.stdin.flush()
            program.send_signal(signal.SIGSTOP)
            time.sleep(2.5)
            program.send_signal(signal.SIGCONT)
        assert program.stdout.readline() == "0 healthy\n"
    assert program.returncode == 0


def guarded(parent_pid: int, death_fd: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", GUARDED, str(parent_pid), str(death_fd)],
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=(death_fd,),
    )


@pytest.fixture
def lifeline():
    """The test may close it itself."""
    line = Lifeline()
    yield line
    line.close()


def test_the_lifeline_alone_ends_a_worker_inside_a_c_call(lifeline):
    """Its parent, this process, lives on."""
    with guarded(os.getpid(), lifeline.worker_fd) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "guarded\n"
        assert worker.poll() is None
        lifeline.close()
        assert worker.wait(SECONDS) == -signal.SIGKILL


def test_the_end_of_the_spawning_thread_alone_ends_a_worker_inside_a_c_call(lifeline):
    """The lifeline stays open."""
    spawned: list[subprocess.Popen[str]] = []
    ready, leave = threading.Event(), threading.Event()

    def spawn() -> None:
        spawned.append(guarded(os.getpid(), lifeline.worker_fd))
        ready.set()
        leave.wait()

    spawner = threading.Thread(target=spawn)
    spawner.start()
    ready.wait()
    with spawned[0] as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "guarded\n"
        assert worker.poll() is None
        leave.set()
        spawner.join()
        assert worker.wait(SECONDS) == -signal.SIGKILL


def test_a_worker_whose_parent_is_gone_already_does_not_begin(lifeline):
    with guarded(
        os.getpid() + 1, lifeline.worker_fd
    ) as worker:  # as if the real parent had died and been replaced
        assert worker.communicate(timeout=30)[0] == ""
    assert worker.returncode == 1
    lifeline._own.close()
    with guarded(os.getpid(), lifeline.worker_fd) as worker:
        assert worker.communicate(timeout=30)[0] == ""
    assert worker.returncode == 1


CORRESPONDENT = """
import os, sys, time
from ipc.lifeline import WorkerEnd
from workers.guard import die_with
die_with(int(sys.argv[1]), int(sys.argv[2]))
end = WorkerEnd(int(sys.argv[2]))
for _ in sys.stdin:
    fd = os.memfd_create("from the worker")
    os.write(fd, b"there")
    assert end.give("there", fd)
    os.close(fd)
    print("sent", flush=True)
    sys.stdin.readline()
    back = end.take("back")
    assert end.take("back") is None
    print(os.pread(back, 9, 0).decode(), flush=True)
    os.close(back)
"""


def test_files_go_both_ways_along_a_lifeline_without_harm(lifeline):
    """Although the worker would die of a single byte that came by the lifeline itself."""
    command = [sys.executable, "-c", CORRESPONDENT, str(os.getpid()), str(lifeline.worker_fd)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, pass_fds=(lifeline.worker_fd,), **pipes) as worker:
        lifeline.handed_over()

        def say() -> str:
            worker.stdin.write("\n")
            worker.stdin.flush()
            return worker.stdout.readline()

        for _ in range(3):
            assert say() == "sent\n"
            assert lifeline.take("another") is None
            there = lifeline.take("there")
            assert os.pread(there, 9, 0) == b"there"
            os.ftruncate(there, 0)
            os.pwrite(there, b"back", 0)
            assert lifeline.give("back", there)
            os.close(there)
            assert say() == "back\n"
        assert worker.poll() is None
        lifeline._own.send(b"x")
        assert worker.wait(SECONDS) == -signal.SIGKILL
    assert lifeline.take("there") is None  # nobody is there any more
    assert not lifeline.give("back", 0)
