"""A lane that is elsewhere: carries frames between the hub and a speculator server, in a thread of its own.

Knows of messages only the first two: it asks a server to be attached, and is told whether it is. What follows
passes unread. It tries the servers in their order until one takes it. Once attached it ends with the
connection, which is then as dead as a worker that was killed; nothing is resumed.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from ipc import codec
from ipc.channel import limited
from ipc.errors import MalformedFrame
from ipc.messages import WIRE_VERSION, Attach, Failed, Greeted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.channel import Hub
    from ipc.keys import ClientKeys

GOODBYE = b""
"""A frame without a message, from either side: the session is over, and that is no accident."""
CONNECT_SECONDS = 3.0
ANSWER_SECONDS = 2.0
"""How long one of several servers may keep us waiting before the next is asked."""
HEARTBEAT_MS, SILENCE_MS = 1000, 5000
"""ZeroMQ's own: a host that is gone, or a cable, closes no connection."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0
_LAST_WORDS_MS = 200
_REFUSED = zmq.Event.HANDSHAKE_FAILED_AUTH
_MISUNDERSTOOD = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL, zmq.Event.HANDSHAKE_FAILED_PROTOCOL
_ENDED = zmq.Event.CLOSED, zmq.Event.DISCONNECTED


@dataclass(frozen=True, slots=True)
class Errand:
    """Who asks whom. `fails_fast`: where no server takes it at once, that is the end of it, and `advice` the
    last word on it."""

    identity: str
    epoch: str
    client: str
    addresses: Sequence[str]
    keys: ClientKeys | None
    fails_fast: bool
    advice: str = ""


class _Line(NamedTuple):
    """A connection, and the socket that tells what becomes of it."""

    address: str
    socket: zmq.Socket[bytes]
    news: zmq.Socket[bytes]


class Relay:
    """Made by the coordinator's thread, run by its own."""

    def __init__(self, hub: Hub, errand: Errand) -> None:
        self._errand = errand
        self._context, self._wire = hub.wire(errand.identity)
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._line: _Line | None = None
        self._greeting = b""
        self.calls = 0
        """How many servers have been tried so far, each time that they were."""
        self.stopped = False
        self.address = ""
        """Of the server that it is attached to, once it is."""

    def stop(self) -> None:
        """Let `run` return soon. May be called from any thread, until `close`."""
        self.stopped = True
        os.eventfd_write(self._stop, 1)

    def run(self) -> str:
        """Why it ended; empty if it was meant to."""
        try:
            return self._attach() or self._carry()
        finally:
            self._hang_up()
            self._wire.close(linger=_LAST_WORDS_MS)

    def close(self) -> None:
        """After `run` has returned."""
        os.close(self._stop)

    # ------------------------------------------------------------ attach

    def _attach(self) -> str:
        """Until a server takes us; why not, if this was the only chance."""
        pause = _FIRST_PAUSE
        while True:
            reasons = []
            for address in self._errand.addresses:
                reason = self._try(address)
                if not reason or self._over():
                    return ""
                self._hang_up()
                reasons.append(reason)
            if self._errand.fails_fast:
                return self._tell("configuration", "; ".join([*reasons, self._errand.advice]))
            zmq.select([self._stop, self._wire], [], [], pause)
            if self._over():
                return ""
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try(self, address: str) -> str:
        """Why this server does not take us; empty if it does, or if it does not matter any more."""
        try:
            line = self._line = self._dial(address)
        except zmq.ZMQError as error:
            return f"{address} cannot be reached: {error}"
        if (reason := self._shake_hands(line)) or self._over():
            return reason
        line.socket.send(codec.encode(Attach(self._errand.epoch, WIRE_VERSION, self._errand.client)))
        alone = len(self._errand.addresses) == 1
        deadline = None if alone else time.monotonic() + ANSWER_SECONDS
        while not self._over():
            ready = self._wait([line.socket, line.news], deadline)
            if line.socket in ready:
                return self._first_words(line)
            if line.news in ready and _ended(line):
                return f"the server at {address} hung up"
            if deadline is not None and time.monotonic() >= deadline:
                return f"the server at {address} does not serve yet"
        return ""

    def _dial(self, address: str) -> _Line:
        socket = limited(self._context.socket(zmq.DEALER))
        news = socket.get_monitor_socket()
        try:
            # Another one each time: a server that has not missed us yet would not know us a second time.
            self.calls += 1
            socket.setsockopt(zmq.IDENTITY, f"{self._errand.identity}/{self.calls}".encode())
            socket.setsockopt(zmq.RECONNECT_IVL, -1)  # who was cut off is attached anew, or not at all
            socket.setsockopt(zmq.IPV6, "[" in address)
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
            socket.setsockopt(zmq.HANDSHAKE_IVL, int(CONNECT_SECONDS * 1000))
            if (keys := self._errand.keys) is not None:
                socket.curve_publickey = keys.own.public.encode()
                socket.curve_secretkey = keys.own.secret.encode()
                socket.curve_serverkey = keys.server.encode()
            socket.connect(address)
        except BaseException:
            _close(socket, news, linger=0)
            raise
        return _Line(address, socket, news)

    def _shake_hands(self, line: _Line) -> str:
        """Why there is no connection; empty if there is one."""
        deadline = time.monotonic() + CONNECT_SECONDS
        keyed = self._errand.keys is not None
        while not self._over():
            if line.news not in self._wait([line.news], deadline):
                if time.monotonic() < deadline:
                    continue
                return f"{line.address} does not answer"
            match recv_monitor_message(line.news)["event"]:
                case zmq.Event.HANDSHAKE_SUCCEEDED:
                    return ""
                case event if event == _REFUSED:
                    return (
                        f"the server at {line.address} does not list this client's key; "
                        "add it there with: speclane keys DIR --client NAME"
                    )
                case event if event in _MISUNDERSTOOD:
                    advice = "it has another key than this client trusts" if keyed else "it may want --keys"
                    return f"{line.address} is no speculator server, or {advice}"
                case event if event in _ENDED:
                    advice = "start one: speclane speculator --bind ADDRESS"
                    return f"no speculator server at {line.address}; {advice}"
        return ""

    def _first_words(self, line: _Line) -> str:
        frame = line.socket.recv()
        try:
            fact = codec.decode_fact(frame)
        except MalformedFrame as error:
            return f"{line.address} speaks another language: {error}"
        if isinstance(fact, Failed):
            return f"the server at {line.address}: {fact.message}"
        if not isinstance(fact, Greeted):
            return f"the server at {line.address} began with {type(fact).__name__}"
        self._greeting, self.address = frame, line.address
        return ""

    # ------------------------------------------------------------ carry

    def _carry(self) -> str:
        """Until either side ends it."""
        line = self._line
        if line is None or not self.address:
            return ""
        self._wire.send(self._greeting)
        poller = self._poller(self._wire, line.socket, line.news)
        while not self.stopped:
            ready = [source for source, _ in poller.poll()]
            try:
                if self._wire in ready:
                    _pass_on(self._wire, line.socket)
                if line.socket in ready and _pass_on(line.socket, self._wire):
                    return ""
            except zmq.ZMQError as error:
                return self._tell("internal", f"{line.address} takes nothing: {error}")
            if line.news in ready and line.socket not in ready and _ended(line):
                return self._tell("internal", f"the connection to {line.address} is lost")
        return ""

    def _poller(self, *sources: zmq.Socket[bytes]) -> zmq.Poller:
        poller = zmq.Poller()
        for source in (*sources, self._stop):
            poller.register(source, zmq.POLLIN)
        return poller

    def _wait(self, sources: list[Any], deadline: float | None) -> list[Any]:
        poller = self._poller(*sources, self._wire)
        left = None if deadline is None else max(0, int((deadline - time.monotonic()) * 1000 + 0.999))
        return [source for source, _ in poller.poll(left)]

    def _over(self) -> bool:
        """Whether nobody wants this any more: before it is greeted, all that a lane is told is to stop."""
        return self.stopped or bool(self._wire.poll(0))

    def _tell(self, kind: str, reason: str) -> str:
        with contextlib.suppress(zmq.ZMQError):
            self._wire.send(codec.encode(Failed(self._errand.epoch, kind, reason)))
        return reason

    def _hang_up(self) -> None:
        line, self._line = self._line, None
        if line is not None:
            with contextlib.suppress(zmq.ZMQError):
                line.socket.send(GOODBYE, zmq.NOBLOCK)
            _close(line.socket, line.news, linger=_LAST_WORDS_MS)


def _close(socket: zmq.Socket[bytes], news: zmq.Socket[bytes], linger: int) -> None:
    socket.disable_monitor()
    news.close(linger=0)
    socket.close(linger=linger)


def _pass_on(source: zmq.Socket[bytes], to: zmq.Socket[bytes]) -> bool:
    """All that has come; whether the last was a goodbye."""
    while source.poll(0):
        frame = source.recv(copy=False)
        if len(frame) == 0:
            return True
        to.send(frame, copy=False)
    return False


def _ended(line: _Line) -> bool:
    """Whether the news are that the connection is gone."""
    return recv_monitor_message(line.news)["event"] in _ENDED
