"""A census of what a test may leave behind outside Python's memory, and the assertion that it does not."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.01


def census(directory: Path) -> Counter[str]:
    """How many there are of each kind: child processes, threads, descriptors, entries of the directory."""
    count: Counter[str] = Counter()
    count.update(f"process {child.pid}" for child in psutil.Process().children(recursive=True))
    count.update(f"thread {thread.name}" for thread in threading.enumerate())
    count["native thread"] = len(os.listdir("/proc/self/task"))
    count.update(f"entry {path}" for path in directory.iterdir())
    with os.scandir("/proc/self/fd") as entries:
        targets = [_target(entry.path) for entry in entries]
    count.update(f"descriptor {re.sub(r'[0-9]+', '', target)}" for target in targets if target)
    return count


def _target(link: str) -> str:
    """What a descriptor stands for; empty for the one that lists the descriptors, gone by now."""
    try:
        target = os.readlink(link)
    except OSError:
        return ""
    return "" if target == f"/proc/{os.getpid()}/fd" else target


@contextmanager
def assert_nothing_leaks(directory: Path) -> Iterator[None]:
    """Fails if there is more of anything after the block than before.

    What the kernel itself finishes after the fact, such as an ended thread's entry, has a moment to do so.
    """
    before = census(directory)
    yield
    deadline = time.monotonic() + _GRACE_SECONDS
    gc.collect()
    while (more := census(directory) - before) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    assert not more, f"left behind: {dict(more)}"
