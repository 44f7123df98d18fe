"""The only file that knows ZeroMQ: a Hub in the coordinator (ROUTER), a Peer in each worker (DEALER).

Owns sockets, options and waiting. Knows messages only as something to encode; what is legal is the link's.
All waits take a deadline on time.monotonic().
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq

from ipc import codec
from ipc.errors import MalformedFrame, PeerGone, WireError

if TYPE_CHECKING:
    from pathlib import Path

    from ipc.messages import Fact, Order

MAX_PATH_BYTES = 107
"""Longest path of a UNIX socket (sun_path without its final zero)."""
HUB = "hub"
"""Name of a hub's socket in its directory."""
_INLINE = "inproc://hub"
"""Where workers connect that are threads of the hub's process; known within its context only."""
_QUEUED_MESSAGES = 256
_SEND_TIMEOUT_MS = 1000


class Arrived(NamedTuple):
    """A fact from a worker, by the worker's identity `lane/epoch`."""

    identity: str
    fact: Fact


class Garbled(NamedTuple):
    """A frame that is no fact; `reason` says why."""

    identity: str
    reason: str


class Readable(NamedTuple):
    """What is watched became readable: a file descriptor (a process ended, a caller called), or a socket."""

    source: Watched


Watched = int | zmq.Socket[bytes]
Event = Arrived | Garbled | Readable


class Hub:
    """The coordinator's end. One thread only."""

    def __init__(self, directory: Path) -> None:
        """Binds in `directory`, which must be fresh and private. Raises WireError if it cannot."""
        path = directory / HUB
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise WireError(f"socket path {path} is longer than {MAX_PATH_BYTES} bytes")
        self.directory = directory
        self.endpoint = f"ipc://{path}"
        self._context = zmq.Context(io_threads=1)
        try:
            self._socket = limited(self._context.socket(zmq.ROUTER))
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.bind(self.endpoint)
            self._socket.bind(_INLINE)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise WireError(f"no socket at {path}: {error}") from error
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def peer(self, identity: str) -> Peer:
        """The end of a worker that is a thread of this process. It must be closed before the hub is."""
        return Peer(_INLINE, identity, self._context)

    def wire(self, identity: str) -> tuple[zmq.Context[Any], zmq.Socket[bytes]]:
        """The end of a worker that is somewhere else, for the thread that carries its frames: bare, and the
        context for the socket to go on with. Both must be closed before the hub is."""
        return self._context, dealer(self._context, _INLINE, identity)

    def send(self, identity: str, order: Order) -> None:
        """Raises PeerGone if the worker is not connected or takes nothing for a second."""
        try:
            self._socket.send_multipart([identity.encode(), codec.encode(order)])
        except zmq.ZMQError as error:
            raise PeerGone(f"{identity} takes no {type(order).__name__}: {error}") from error

    def receive(self, deadline: float) -> Event | None:
        """The next event, or None when the deadline passes."""
        while True:
            left_ms = (deadline - time.monotonic()) * 1000
            ready = self._poller.poll(max(0, int(left_ms + 0.999)))
            # What a worker said comes before the news of its end.
            if ready and (event := self._arrived()) is not None:
                return event
            for source, _ in ready:
                if source is not self._socket:
                    return Readable(source)
            if not ready and time.monotonic() >= deadline:
                return None

    def watch(self, source: Watched) -> None:
        self._poller.register(source, zmq.POLLIN)

    def unwatch(self, source: Watched) -> None:
        """Does nothing if it is not watched."""
        with contextlib.suppress(KeyError):
            self._poller.unregister(source)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _arrived(self) -> Event | None:
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        identity = frames[0].decode(errors="replace")
        if len(frames) != 2:
            return Garbled(identity, f"{len(frames) - 1} frames instead of one")
        try:
            return Arrived(identity, codec.decode_fact(frames[1]))
        except MalformedFrame as error:
            return Garbled(identity, str(error))


class Peer:
    """A worker's end."""

    def __init__(self, endpoint: str, identity: str, shared: zmq.Context[Any] | None = None) -> None:
        """`shared`: the hub's context, if that is in the same process."""
        self._shared = shared is not None
        self._context = shared or zmq.Context(io_threads=1)
        self._socket = dealer(self._context, endpoint, identity)

    def send(self, fact: Fact) -> None:
        """Raises PeerGone if the coordinator takes nothing for a second."""
        try:
            self._socket.send(codec.encode(fact))
        except zmq.ZMQError as error:
            raise PeerGone(f"the coordinator takes no {type(fact).__name__}: {error}") from error

    def receive(self, deadline: float) -> Order | None:
        """The next order, or None when the deadline passes. Raises MalformedFrame."""
        left_ms = max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
        if not self._socket.poll(left_ms, zmq.POLLIN):
            return None
        frames = self._socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) != 1:
            raise MalformedFrame(f"{len(frames)} frames instead of one")
        return codec.decode_order(frames[0])

    def close(self) -> None:
        """What was sent just before still has a moment to leave."""
        if self._shared:
            self._socket.close(linger=_SEND_TIMEOUT_MS)
        else:
            self._context.destroy(linger=_SEND_TIMEOUT_MS)


def dealer(context: zmq.Context[Any], endpoint: str, identity: str) -> zmq.Socket[bytes]:
    socket = limited(context.socket(zmq.DEALER))
    socket.setsockopt(zmq.IDENTITY, identity.encode())
    socket.connect(endpoint)
    return socket


def limited(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """What holds for every socket: no wait and no queue without an end."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.SNDHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, _QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, codec.MAX_FRAME_BYTES)
    return socket
