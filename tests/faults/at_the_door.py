"""A process that is killed and not gone: ptrace holds its main thread just before it gives up its memory.

So a test can see what happens between a death and the news of it, however short that is.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SEIZE, _DETACH = 0x4206, 17
_AT_ITS_EXIT = 0x40

_ptrace = ctypes.CDLL(None, use_errno=True).ptrace
_ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
_ptrace.restype = ctypes.c_long


@contextmanager
def held_at_the_door(pid: int) -> Iterator[Callable[[], object]]:
    """A child of this process that is killed within the block is gone only after it.

    What is yielded waits until it is killed, and must be called.
    """
    if _ptrace(_SEIZE, pid, None, _AT_ITS_EXIT) != 0:
        pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
    try:
        yield lambda: os.waitid(os.P_PID, pid, os.WSTOPPED)
    finally:
        os.kill(pid, signal.SIGKILL)  # if nobody did
        _ptrace(_DETACH, pid, None, None)
