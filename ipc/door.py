"""A speculator server's end: executors knock, by their identities `speculator/epoch/call`. One thread only.

Owns the socket and who may come in. Nothing that a client sends is trusted or waited for: each has a queue of
few frames, of few bytes each, and who does not take what is sent to it is gone.
"""

from __future__ import annotations

import contextlib
import os
import socket as sockets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq
from zmq.utils import z85

from ipc.channel import MAX_PATH_BYTES, limited
from ipc.errors import WireError
from ipc.relay import HEARTBEAT_MS, SILENCE_MS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ipc.channel import Watched
    from ipc.keys import ServerKeys

QUEUED_FRAMES = 32
"""Per client, in each direction, beside what the kernel holds."""
_GULP = 64
"""Frames that are taken in at once, from all clients in turn; then the lane is looked after again."""
_ZAP = "inproc://zeromq.zap.01"
_IPC = "ipc://"
_LAST_WORDS_MS = 500


class Knock(NamedTuple):
    """A frame of a client; `user`: the name that its key is listed under, empty without keys."""

    identity: str
    user: str
    frame: bytes


class Door:
    def __init__(self, address: str, keys: ServerKeys | None, max_frame: int) -> None:
        """Binds. `max_frame`: bytes; who sends more is cut off. Raises WireError if the address is taken."""
        self._context = zmq.Context(io_threads=1)
        self._keys = keys
        try:
            self._zap = self._context.socket(zmq.REP)
            self._zap.bind(_ZAP)  # before the socket whose guard it is
            self._socket = limited(self._context.socket(zmq.ROUTER))
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.setsockopt(zmq.SNDHWM, QUEUED_FRAMES)
            self._socket.setsockopt(zmq.RCVHWM, QUEUED_FRAMES)
            self._socket.setsockopt(zmq.SNDTIMEO, 0)
            self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
            if keys is not None:
                self._socket.curve_server = True
                self._socket.curve_publickey = keys.own.public.encode()
                self._socket.curve_secretkey = keys.own.secret.encode()
                self._socket.zap_domain = b"speclane"
            self._bind(address)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise WireError(f"{address} cannot be bound: {os.strerror(error.errno or 0)}") from error
        except WireError:
            self._context.destroy(linger=0)
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _bind(self, address: str) -> None:
        if not address.startswith(_IPC):
            self._socket.setsockopt(zmq.IPV6, "[" in address)
            self._socket.bind(address)
            return
        path = Path(address.removeprefix(_IPC))
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise WireError(f"{address} is longer than {MAX_PATH_BYTES} bytes")
        if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
            raise WireError(f"{path} is there already, and is no socket")
        if _alive(path):  # binding would take the name from under a server that runs
            raise WireError(f"{address} cannot be bound: a server runs there already")
        mask = os.umask(0o177)
        try:
            self._socket.bind(address)
        finally:
            os.umask(mask)

    @property
    def knocks(self) -> Watched:
        """Readable when `receive` has something."""
        return self._socket

    @property
    def questions(self) -> Watched:
        """Readable when somebody asks to come in: `admit`."""
        return self._zap

    def admit(self) -> None:
        """Answer who asks whether a key may come in (ZAP, RFC 27)."""
        with contextlib.suppress(zmq.Again):
            version, request, *_rest, key = self._zap.recv_multipart(zmq.NOBLOCK)[:7]
            known = self._keys.clients if self._keys is not None else {}
            name = known.get(z85.encode(key).decode()) if len(key) == 32 else None
            verdict = (b"200", b"", name.encode()) if name is not None else (b"400", b"not listed", b"")
            self._zap.send_multipart([version, request, *verdict, b""])

    def receive(self) -> Iterator[Knock]:
        """What has come, a gulp of it."""
        for _ in range(_GULP):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity = frames[0].bytes.decode("latin-1")  # any bytes, and back again
            # More than one frame is no message, and will not pass for one.
            yield Knock(identity, self._user(frames[-1]), frames[1].bytes if len(frames) == 2 else b"\xc1")

    def send(self, identity: str, frame: bytes) -> bool:
        """Whether that client is still there, and takes it."""
        try:
            self._socket.send_multipart([identity.encode("latin-1"), frame])
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        """What was sent just before still has a moment to leave."""
        self._context.destroy(linger=_LAST_WORDS_MS)

    def _user(self, frame: zmq.Frame) -> str:
        return str(frame.get("User-Id")) if self._keys is not None else ""


def _alive(path: Path) -> bool:
    with sockets.socket(sockets.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
