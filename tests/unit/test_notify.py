"""What a service says of itself, as a socket hears it."""

from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from executor.notify import Notifier, parse

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def listening(address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(address)
        ear.setblocking(False)
        yield ear


def test_only_news_are_said(tmp_path):
    path = str(tmp_path / "notify")
    with listening(path) as ear:
        notifier = Notifier({"NOTIFY_SOCKET": path})
        notifier.say(READY="1", STATUS="two\nlines")
        notifier.say(READY="1", STATUS="two\nlines")
        notifier.say(READY="1", STATUS="one")
        notifier.alive()
        notifier.alive()
        said = [ear.recv(1000) for _ in range(4)]
        assert said == [b"READY=1\nSTATUS=two lines", b"STATUS=one", b"WATCHDOG=1", b"WATCHDOG=1"]
        with pytest.raises(BlockingIOError):
            ear.recv(1000)


def test_a_name_without_a_file_will_do():
    name = f"speclane-test-{os.getpid()}"
    with listening(f"\0{name}") as ear:
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).say(READY="1")
        assert ear.recv(100) == b"READY=1"


def test_who_is_not_heard_says_it_again(tmp_path):
    path = str(tmp_path / "notify")
    notifier = Notifier({"NOTIFY_SOCKET": path})
    notifier.say(READY="1")
    with listening(path) as ear:
        notifier.say(READY="1")
        assert ear.recv(100) == b"READY=1"


def test_without_a_socket_nothing_is_said():
    notifier = Notifier({"WATCHDOG_USEC": "1000000"})
    notifier.say(READY="1")
    notifier.alive()
    assert notifier.watchdog_seconds is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ({"WATCHDOG_USEC": "1500000"}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_how_often_a_sign_of_life_is_due(given, seconds):
    assert Notifier({"NOTIFY_SOCKET": "/nowhere"} | given).watchdog_seconds == seconds


def test_what_is_no_line_is_dropped():
    assert parse(b"READY=1\nnonsense\n=x\nSTATUS=a=b\nEMPTY=\n\xff=1") == {
        "READY": "1",
        "STATUS": "a=b",
        "EMPTY": "",
        "�": "1",
    }
