"""How a worker's end is heard of before it is over.

The kernel first takes a killed process's memory apart, and only then closes its files and says that it has
ended: some milliseconds for each hundred megabytes. But every thread ends by itself, and what all of them
share is taken apart by the last one. So two threads that do nothing hold the one end of a pipe each, in a
table of files of their own. At most one of them is the last, so one of the pipes breaks at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading

CANARIES = 2
_CLOSE_RANGE = 436
"""The system call's number, on all architectures; the C library has it from 2.34 on."""
_UNSHARE = 2
_HIGHEST = 0xFFFFFFFF


def canaries() -> list[int]:
    """Ends of pipes, the caller's to close: of one the other end closes as soon as this process is killed.

    None if the kernel gives threads no files of their own (before Linux 5.9), or there is no thread to be
    had: then the process's end is heard of when it is over, as that of any other. Raises OSError for want of
    descriptors.
    """
    found = [_canary() for _ in range(CANARIES)]
    return [end for end in found if end is not None]


def _canary() -> int | None:
    ours, its = os.pipe()
    settled = threading.Event()
    alone = False

    def sit() -> None:
        nonlocal alone
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        try:
            alone = _hold_only(its)
        finally:
            settled.set()
        if alone:
            threading.Event().wait()

    with contextlib.suppress(RuntimeError):
        threading.Thread(target=sit, name="canary", daemon=True).start()
        settled.wait()
    os.close(its)
    if not alone:
        os.close(ours)
        return None
    return ours


def _hold_only(fd: int) -> bool:
    """Have this thread a table of files of its own, with this one in it; whether it has."""
    return _close_range(fd + 1, _HIGHEST, _UNSHARE) and (fd == 0 or _close_range(0, fd - 1, 0))


def _close_range(first: int, last: int, flags: int) -> bool:
    call = ctypes.CDLL(None).syscall
    return bool(call(_CLOSE_RANGE, ctypes.c_uint(first), ctypes.c_uint(last), ctypes.c_int(flags)) == 0)
