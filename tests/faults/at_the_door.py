"""A process that is killed and not gone: ptrace holds its main thread just before it gives up its memory.

So a test can see what happens between a death and the news of it, however short that is. Run as
`python at_the_door.py PID` this holds it: in a process of its own, since whoever traces another is told of it
in the place of its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SEIZE, _DETACH = 0x4206, 17
_AT_ITS_EXIT = 0x40


@contextmanager
def held_at_the_door(pid: int) -> Iterator[Callable[[], object]]:
    """A process that is killed within the block is gone only after it. What is yielded waits until it is
    killed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, __file__, str(pid)], **pipes) as holder:
        if (said := holder.stdout.readline()) != "seized\n":
            pytest.skip(f"no ptrace here: {said}")

        def killed() -> None:
            assert holder.stdout.readline() == "there\n"

        try:
            yield killed
        finally:
            os.kill(pid, signal.SIGKILL)  # if nobody did


def hold(pid: int) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    if ptrace(_SEIZE, pid, None, _AT_ITS_EXIT) != 0:
        print(os.strerror(ctypes.get_errno()))  # noqa: T201
        return
    print("seized", flush=True)  # noqa: T201
    os.waitid(os.P_PID, pid, os.WSTOPPED)
    print("there", flush=True)  # noqa: T201
    sys.stdin.read()
    ptrace(_DETACH, pid, None, None)


if __name__ == "__main__":
    hold(int(sys.argv[1]))
