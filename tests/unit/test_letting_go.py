"""What a benchmark sees of memory that is let go of, and of an end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from executor.bench.letting_go import LettingGo, mapped
from ipc.memfd import MemfdMemory


def child() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)


def test_the_order_of_events_is_told():
    memory = MemfdMemory(1 << 16)
    assert mapped(os.getpid()) == 1
    with child() as process:
        watch = LettingGo(process.pid, os.getpid())
        began = time.perf_counter()
        assert memory.close()
        while watch._unmapped is None:
            time.sleep(0.001)
        process.kill()
        unmapped, ended = watch.since(began)
    assert unmapped is not None
    assert 0 < unmapped < ended


def test_where_nothing_is_shared_there_is_only_an_end():
    assert mapped(os.getpid()) == 0
    with child() as process:
        watch = LettingGo(process.pid, os.getpid())
        process.kill()
        unmapped, ended = watch.since(time.perf_counter() - 1.0)
    assert unmapped is None
    assert ended > 0
    assert mapped(process.pid) == 0
