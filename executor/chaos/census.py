"""What this process holds of the system: worker processes and open descriptors by kind, resident memory."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter

import psutil

KINDS = ("processes", "fds", "memfds", "sockets")
_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.02


def census() -> Counter[str]:
    """How many there are of each of KINDS; `fds` are those that are neither memfds nor sockets."""
    count: Counter[str] = Counter(processes=len(_processes()))
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            try:
                target = os.readlink(entry.path)
            except OSError:
                continue
            if target != f"/proc/{os.getpid()}/fd":  # that is the one which lists them
                count[_kind(target)] += 1
    return count


def left_behind(before: Counter[str]) -> dict[str, int]:
    """How many more there are than before, of each of KINDS. The kernel has a moment to finish."""
    gc.collect()
    deadline = time.monotonic() + _GRACE_SECONDS
    while (more := census() - before) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return {kind: more[kind] for kind in KINDS}


def resident_bytes() -> int:
    """Physical memory of this process, the coordinator's."""
    return int(psutil.Process().memory_info().rss)


def _kind(target: str) -> str:
    if target.startswith("socket:"):
        return "sockets"
    return "memfds" if target.startswith("/memfd:") else "fds"


def _processes() -> set[int]:
    """Children, and whatever else was started for this coordinator and found another parent since."""
    found = {child.pid for child in psutil.Process().children(recursive=True)}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if "--parent-pid" in words and str(os.getpid()) in words:
            found.add(process.pid)
    return found
