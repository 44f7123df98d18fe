"""The leak check itself: it must fail when something is left behind, or it proves nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from leaks import assert_nothing_leaks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def leak(monkeypatch):
    """Runs a block under the check, without the grace that real leaks do not need."""
    monkeypatch.setattr("leaks._GRACE_SECONDS", 0.0)
    return assert_nothing_leaks


def test_nothing_left_passes(leak, tmp_path: Path):
    with leak(tmp_path):
        os.close(os.memfd_create("gone"))


@pytest.mark.parametrize("kind", ["socket", "pipe", "memfd", "file"])
def test_a_descriptor_is_found(leak, tmp_path: Path, kind: str):
    made: list[int] = []

    def make() -> None:
        match kind:
            case "socket":
                made.extend(end.detach() for end in socket.socketpair())
            case "pipe":
                made.extend(os.pipe())
            case "memfd":
                made.append(os.memfd_create("left"))
            case "file":
                made.append(os.open("/dev/null", os.O_RDONLY))

    shown = "null" if kind == "file" else kind
    try:
        with pytest.raises(AssertionError, match=f"descriptor .*{shown}"), leak(tmp_path):
            make()
    finally:
        for fd in made:
            os.close(fd)


def test_a_process_is_found(leak, tmp_path: Path):
    child = None
    try:
        with pytest.raises(AssertionError, match="process"), leak(tmp_path):
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    finally:
        assert child is not None
        child.communicate(b"\n")


def test_a_thread_is_found(leak, tmp_path: Path):
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="lingering")
    try:
        with pytest.raises(AssertionError, match="thread lingering"), leak(tmp_path):
            thread.start()
    finally:
        release.set()
        thread.join()


def test_a_directory_is_found(leak, tmp_path: Path):
    with pytest.raises(AssertionError, match=r"entry .*speclane-x"), leak(tmp_path):
        (tmp_path / "speclane-x").mkdir()
