"""A TCP proxy on the loopback that makes a way longer than it is: what crosses is held back.

Threads that sleep, since those wake within a tenth of a millisecond; an event loop may take ten times that.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

_HOST = "127.0.0.1"
_PIECE_BYTES = 1 << 16


class LongWire:
    """`with LongWire(port, 0.005) as wire`: who connects to `wire.address` is connected to that port of this
    host, with a round trip that takes 5 ms more. Each direction has half of that."""

    def __init__(self, port: int, seconds: float) -> None:
        """Raises OSError if there is no port to listen on."""
        self._to = port
        self._delay = seconds / 2
        self._listening = socket.create_server((_HOST, 0))
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.address = f"tcp://{_HOST}:{self._listening.getsockname()[1]}"

    def __enter__(self) -> LongWire:
        self._accepting = threading.Thread(target=self._accept, name="speclane-long-wire", daemon=True)
        self._accepting.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listening, *self._ends):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # unlike closing, that wakes who waits for it
        self._accepting.join()
        for thread in self._threads:
            thread.join()
        for each in (self._listening, *self._ends):
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listening.accept()
            except OSError:
                return
            self._ends.append(near)
            try:
                far = socket.create_connection((_HOST, self._to))
            except OSError:
                near.shutdown(socket.SHUT_RDWR)
                continue
            self._ends.append(far)
            for source, to in ((near, far), (far, near)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                pieces: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
                for carry, end in ((self._take, source), (_give, to)):
                    thread = threading.Thread(target=carry, args=(end, pieces), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _take(self, source: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
        piece = b"?"
        while piece:
            try:
                piece = source.recv(_PIECE_BYTES)
            except OSError:
                piece = b""
            pieces.put((time.monotonic() + self._delay, piece))


def _give(to: socket.socket, pieces: queue.SimpleQueue[tuple[float, bytes]]) -> None:
    """Each piece leaves so long after it has come; the next one does not wait for that."""
    with suppress(OSError):  # whoever it was for is gone
        while True:
            at, piece = pieces.get()
            time.sleep(max(0.0, at - time.monotonic()))
            if not piece:
                to.shutdown(socket.SHUT_WR)
                return
            to.sendall(piece)
