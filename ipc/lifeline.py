"""The socket pair between the coordinator and one worker: its end is the worker's, and files go along it.

The worker dies by a signal of the kernel when anything happens at its end: that is how it notices, even
inside a C call, that the coordinator is gone (workers.guard). So the coordinator must never send there. What
it has for the worker goes to a mailbox, another socket pair, whose end the worker sends it first of all.

A file's name is sent with it, before the message that speaks of it; so whoever hears of a file finds it here.
The worker may also send canaries: files that tell of its end before it is over.
"""

from __future__ import annotations

import contextlib
import os
import socket
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_NAME_BYTES = 200
_MAILBOX = "mailbox"
_CANARY = "canary"
_HELD_FILES = 16
"""So many files that nobody asked for are kept; who sends more of them is not to be trusted."""


class _Files:
    """Files that came along a socket, until somebody asks for them by name."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}

    def take(self, source: socket.socket, name: str) -> int | None:
        """The file of this name, now the caller's to close, or None if it has not come."""
        self._receive(source)
        return self._held.pop(name, None)

    def _receive(self, source: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while self._receive_one(source):
                pass

    def _receive_one(self, source: socket.socket) -> bool:
        """False at the end of what will ever come."""
        # Not socket.recv_fds, which leaves the flags out: it would wait, and its files would be inherited.
        flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        frame, ancillary, *_ = source.recvmsg(_NAME_BYTES, socket.CMSG_SPACE(array("i").itemsize), flags)
        name = frame.decode(errors="replace")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                for fd in array("i", data):
                    if len(self._held) < _HELD_FILES and name not in self._held:
                        self._held[name] = fd
                    else:
                        os.close(fd)
        return bool(frame)

    def close(self) -> None:
        while self._held:
            os.close(self._held.popitem()[1])


class Lifeline:
    """The coordinator's end. One thread only."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._own, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mailbox: socket.socket | None = None
        self._files = _Files()
        self.canaries: list[int] = []
        """Ends of pipes; one of them breaks as soon as the worker is killed. None before `listen`."""

    @property
    def worker_fd(self) -> int:
        """What the worker is to inherit."""
        return self._theirs.fileno()

    def handed_over(self) -> None:
        """The worker has its end, or never will."""
        self._theirs.close()

    def listen(self) -> None:
        """The worker has said its first word, so its canaries are here, if it has any."""
        while (canary := self.take(f"{_CANARY} {len(self.canaries)}")) is not None:
            self.canaries.append(canary)

    def take(self, name: str) -> int | None:
        """A file that the worker sent, now the caller's to close, or None."""
        return self._files.take(self._own, name)

    def give(self, name: str, fd: int) -> bool:
        """Send the worker a copy of a file; whether it could be sent."""
        if self._mailbox is None:
            mailbox = self._files.take(self._own, _MAILBOX)
            if mailbox is None:
                return False
            self._mailbox = socket.socket(fileno=mailbox)
        return _send(self._mailbox, name, fd)

    def close(self) -> None:
        """The worker dies of it."""
        self._theirs.close()
        self._own.close()
        self._files.close()
        while self.canaries:
            os.close(self.canaries.pop())
        if self._mailbox is not None:
            self._mailbox.close()


class WorkerEnd:
    """The worker's end, which must have been bound to its life before. One thread only."""

    def __init__(self, fd: int, canaries: Sequence[int] = ()) -> None:
        """`canaries`: see Lifeline; they are taken over."""
        self._own = socket.socket(fileno=fd)
        self._mailbox, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._files = _Files()
        with theirs:
            _send(self._own, _MAILBOX, theirs.fileno())
        for number, canary in enumerate(canaries):
            _send(self._own, f"{_CANARY} {number}", canary)
            os.close(canary)

    def give(self, name: str, fd: int) -> bool:
        """Send the coordinator a copy of a file; whether it could be sent."""
        return _send(self._own, name, fd)

    def take(self, name: str) -> int | None:
        """A file that the coordinator sent, now the caller's to close, or None."""
        return self._files.take(self._mailbox, name)


def _send(target: socket.socket, name: str, fd: int) -> bool:
    try:
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))
        target.sendmsg([name.encode()], [rights], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError:
        return False
    return True
