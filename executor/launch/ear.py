"""Where the processes of a topology say how they are: one socket, and the kernel says who spoke."""

from __future__ import annotations

import os
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

from executor.notify import parse

if TYPE_CHECKING:
    from pathlib import Path

_BYTES = 4096
_CREDENTIALS = struct.Struct("iii")


class Heard(NamedTuple):
    pid: int
    facts: dict[str, str]


class Ear:
    def __init__(self, path: Path) -> None:
        """`path`: of the socket, which must not exist. Raises OSError."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._socket.bind(str(path))
            self._socket.setblocking(False)
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def hear(self) -> Heard | None:
        """What was said next, None if nothing was. What is of another user is dropped."""
        while True:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return None
            for level, kind, value in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    pid, uid, _ = _CREDENTIALS.unpack(value[: _CREDENTIALS.size])
                    if uid in (os.geteuid(), 0):
                        return Heard(pid, parse(data))

    def close(self) -> None:
        self._socket.close()
        self.path.unlink(missing_ok=True)
