"""A worker never outlives its coordinator, not even inside a long C call that holds the GIL.

Two kernel mechanisms, neither of which needs a thread or the interpreter of the worker to run:
* PDEATHSIG: SIGKILL when the thread that spawned the worker ends (the coordinator's own thread);
* the lifeline, a socket pair whose other end only the coordinator holds: when that closes, the kernel sends
  the signal chosen by F_SETSIG, here SIGKILL too. It would do so if anything were sent, so nothing ever is;
  see ipc.lifeline.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int, death_fd: int) -> None:
    """Bind this process's life to its parent's. Exits at once if the parent is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    fcntl.fcntl(death_fd, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(death_fd, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(death_fd, fcntl.F_SETFL, fcntl.fcntl(death_fd, fcntl.F_GETFL) | os.O_ASYNC)
    # Both only report what happens from now on: what happened before has to be looked for.
    closed = bool(select.select([death_fd], [], [], 0)[0])
    if closed or os.getppid() != parent_pid:
        os._exit(1)
