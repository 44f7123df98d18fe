"""Canaries hold one file each and no other, break when they should, and are done without where need be."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading

import pytest

from workers import canary

HELD = """
import os, sys
from workers.canary import canaries

ends = canaries()
own = {os.readlink(f"/proc/self/fd/{fd}") for fd in ends}
for thread in os.listdir("/proc/self/task"):
    if int(thread) != os.getpid():
        files = [os.readlink(entry.path) for entry in os.scandir(f"/proc/self/task/{thread}/fd")]
        assert len(files) == 1, files
        own -= set(files)
assert len(ends) == 2 and not own
os.dup2(ends[0], int(sys.argv[1]))
os.dup2(ends[1], int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_each_holds_its_pipe_and_no_other_file():
    """So nothing that its process closes stays open."""
    done = subprocess.run(
        [sys.executable, "-c", HELD, "100", "101"], input="", capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ready\n", "")


def test_both_break_when_their_process_is_killed():
    command = [sys.executable, "-c", HELD, "100", "101"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        ours = [os.open(f"/proc/{process.pid}/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK) for fd in (100, 101)]
        assert select.select(ours, [], [], 0)[0] == []
        process.kill()
        for fd in ours:
            assert select.select([fd], [], [], 60)[0] == [fd]
            assert os.read(fd, 1) == b""
            os.close(fd)


def without_files_of_their_own(monkeypatch):
    monkeypatch.setattr(canary, "_close_range", lambda *about: False)


def without_threads(monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)


@pytest.mark.parametrize("want", [without_files_of_their_own, without_threads])
def test_there_are_none_where_there_can_be_none(monkeypatch, want):
    want(monkeypatch)
    before = os.listdir("/proc/self/fd")
    assert canary.canaries() == []
    assert os.listdir("/proc/self/fd") == before
