"""One worker process: start, watch, end. Signals go through its pidfd only, so never to a stranger.

Must be used by a thread that lives as long as the worker: the worker's parent-death signal is tied to it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from executor import mps
from executor.notify import NOTIFY_VARIABLES
from executor.placement import Placement
from ipc.lifeline import Lifeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ipc.messages import LaneName

_TAIL_BYTES = 4096
_ENDING = (signal.SIGABRT, signal.SIGKILL)
_STDERR_BYTES = 16 << 20
"""So much of what a worker writes is kept, in memory, before all but its tail is dropped."""


def command(lane: LaneName, epoch: str, endpoint: str, death_fd: int, *rank: str) -> list[str]:
    """What to run for a lane; `rank`: options of one of several processes."""
    return [
        *(sys.executable, "-P", "-m", "workers"),
        *("--lane", lane, "--epoch", epoch, "--endpoint", endpoint),
        *("--parent-pid", str(os.getpid()), "--death-fd", str(death_fd)),
        *rank,
    ]


class WorkerProcess:
    def __init__(
        self,
        lane: LaneName,
        epoch: str,
        endpoint: str,
        threads: int,
        place: Placement | None = None,
        rank: Sequence[str] = (),
    ) -> None:
        """Starts it; `rank`: options of one of several processes of the lane. Raises OSError."""
        place = place or Placement()
        with ExitStack() as undo:
            # Unlike a pipe, a file cannot fill up and block a talkative worker; this one needs no disk.
            self._stderr = os.memfd_create("stderr", os.MFD_CLOEXEC)
            undo.callback(os.close, self._stderr)
            fcntl.fcntl(
                self._stderr, fcntl.F_SETFL, os.O_APPEND
            )  # after trim_stderr it starts from the front
            self.lifeline = Lifeline()
            undo.callback(self.lifeline.close)
            try:
                with _on_cores(place.cores):
                    self._popen = subprocess.Popen(
                        command(lane, epoch, endpoint, self.lifeline.worker_fd, *rank),
                        stdin=subprocess.DEVNULL,
                        stdout=self._stderr,
                        stderr=self._stderr,
                        pass_fds=(self.lifeline.worker_fd,),
                        env=_environment(threads, place.environment),
                        start_new_session=True,  # the terminal's Ctrl-C is the coordinator's to handle
                    )
            finally:
                self.lifeline.handed_over()
            undo.callback(self._popen.wait)
            undo.callback(self._popen.kill)
            self.pidfd = os.pidfd_open(self._popen.pid)
            undo.pop_all()
        self.pid = self._popen.pid
        self.pids = (self.pid,)
        self._closed = False
        self._lock = threading.Lock()  # a closed pidfd's number may already be another lane's
        self._parting = mps.parting(place.environment, self.pid, self._signal)

    def kill(self, number: signal.Signals = signal.SIGKILL) -> bool:
        """Whether there was a process to take the signal. May be called from any thread.

        Under MPS its work on the GPU is ended first, so an ending signal may come a moment later.
        """
        if self._parting is not None and number in _ENDING and self._popen.returncode is None:
            self._parting.then(number)
            return True
        return self._signal(number)

    def _signal(self, number: signal.Signals) -> bool:
        with self._lock:
            if self._closed:
                return False
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                return False
            return True

    def wait(self, deadline: float) -> int | None:
        """The exit status (negative: the signal), or None if it still runs at `deadline` (time.monotonic)."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        poller.poll(max(0, int((deadline - time.monotonic()) * 1000)))
        return self._popen.poll()

    def describe_exit(self, status: int) -> str:
        return describe_exit(status)

    def stderr_tail(self) -> str:
        """The last lines that the worker wrote."""
        return self._tail().decode(errors="replace").strip()

    def trim_stderr(self) -> None:
        """Once it has written too much to keep, forget all but the last lines."""
        if os.fstat(self._stderr).st_size > _STDERR_BYTES:
            tail = self._tail()
            os.ftruncate(self._stderr, 0)
            os.write(self._stderr, tail)

    def _tail(self) -> bytes:
        size = os.fstat(self._stderr).st_size
        return os.pread(self._stderr, _TAIL_BYTES, max(0, size - _TAIL_BYTES))

    def close(self) -> None:
        """Ends the worker if it still runs, reaps it and frees all that was held for it."""
        if self._popen.poll() is None:
            self.kill()
            self._popen.wait()
        self.lifeline.close()
        if self._parting is not None:
            self._parting.close()
        with self._lock:
            self._closed = True
            os.close(self.pidfd)
        os.close(self._stderr)


def describe_exit(status: int) -> str:
    """`exited with status 3`, `killed by SIGKILL`."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


@contextmanager
def _on_cores(cores: frozenset[int] | None) -> Iterator[None]:
    """What this thread starts may use these cores only; its own it gets back. Raises OSError."""
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def numeric_environment(threads: int) -> dict[str, str]:
    """This process's environment with what a worker's arithmetic goes by; what is set already stays."""
    defaults = {
        # A step has parts that one thread computes, far shorter than a millisecond. The others of its pool
        # spin through them (GNU's library, LLVM's): sleeping, they are woken hundreds of times a step. To
        # spin longer would take the time of the other lane, where lanes share cores.
        "GOMP_SPINCOUNT": "10000",
        "KMP_BLOCKTIME": "1",
        # Reading all weights for every step is what a CPU waits for; large pages make it a fifth faster.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
    return defaults | dict(os.environ) | {"OMP_NUM_THREADS": str(threads)}


def _environment(threads: int, own: Mapping[str, str]) -> dict[str, str]:
    environment = numeric_environment(threads) | dict(own)
    for name in NOTIFY_VARIABLES:  # the executor's to answer, not its workers'
        environment.pop(name, None)
    environment["HF_HUB_OFFLINE"] = (
        "1"  # a worker reads local files only; fetching was done before it started
    )
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
