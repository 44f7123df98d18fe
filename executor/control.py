"""The control socket of a running executor: its own user may ask how it is, and swap the speculator.

One small thread serves all connections and waits for none of them; a swap runs in a thread of its own. What a
client may cost is bounded: in number, in bytes and in seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from dataclasses import astuple, dataclass, field
from logging import WARNING
from typing import TYPE_CHECKING, Protocol

from executor.control_wire import (
    HEADER,
    MAX_REQUEST_BYTES,
    Dropped,
    Reported,
    ReportStatus,
    Swapped,
    SwapSpeculator,
    credentials,
    decode_request,
    framed,
    refusal,
)
from executor.errors import SpeclaneError
from executor.events import record
from executor.rundir import CONTROL
from ipc.errors import MalformedFrame

if TYPE_CHECKING:
    from pathlib import Path

    from executor.control_wire import Reply, Request
    from executor.status import Status

MAX_CONNECTIONS = 16
CLIENT_SECONDS = 2.0
"""For a client to send its request, and to take its reply."""
_QUEUED = 64
_DEAF_SECONDS = 1.0
"""After a connection could not be accepted, for want of descriptors."""
_SWAP_END_SECONDS = 1.0


class Controlled(Protocol):
    """What can be controlled; may be called from any thread."""

    @property
    def speculation(self) -> str: ...

    def status(self) -> Status: ...

    def swap_speculator(self, model: str, timeout: float | None = None) -> None: ...


@dataclass(slots=True)
class DropCounts:
    """As in control_wire.Dropped."""

    strangers: int = 0
    malformed: int = 0
    late: int = 0


@dataclass(slots=True, eq=False)
class _Connection:
    """Reads a request, perhaps waits for a swap, writes the reply. `deadline`: of reading or writing."""

    socket: socket.socket
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    to_send: bytes = b""
    waiting: bool = False

    @property
    def interest(self) -> int:
        if self.to_send:
            return select.POLLOUT
        return 0 if self.waiting else select.POLLIN


class ControlServer:
    def __init__(self, directory: Path, controlled: Controlled) -> None:
        """Listens in `directory`, which is private. Raises OSError, or RuntimeError for want of a thread."""
        self._controlled = controlled
        self._connections: dict[int, _Connection] = {}
        self._swap: threading.Thread | None = None
        self._swapped: deque[tuple[_Connection, Reply]] = deque()
        self._closing = False
        self._deaf_until = 0.0
        self._lock = threading.Lock()  # guards the waking pipe against its end
        self.dropped = DropCounts()
        with contextlib.ExitStack() as undo:
            self._listener = undo.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.setblocking(False)
            self._listener.bind(str(directory / CONTROL))
            self._listener.listen(_QUEUED)
            self._alarm, self._call = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            undo.callback(os.close, self._alarm)
            undo.callback(os.close, self._call)
            self._thread = threading.Thread(target=self._run, name="speclane-control", daemon=True)
            self._thread.start()
            undo.pop_all()

    def close(self) -> None:
        """End it; a swap that ends meanwhile is still answered. Idempotent."""
        if self._swap is not None:
            self._swap.join(_SWAP_END_SECONDS)
        with self._lock:
            if self._closing:
                return
            self._closing = True
            os.write(self._call, b"!")
        self._thread.join()
        with self._lock:
            os.close(self._alarm)
            os.close(self._call)

    # ------------------------------------------------------------ the control thread

    def _run(self) -> None:
        try:
            while not self._closing:
                self._turn()
            self._answer_swaps()
        finally:
            self._listener.close()
            for connection in list(self._connections.values()):
                self._drop(connection)

    def _turn(self) -> None:
        """Wait for something to do, and do it."""
        poller = select.poll()
        poller.register(self._alarm, select.POLLIN)
        now = time.monotonic()
        deadlines = []
        if now < self._deaf_until:
            deadlines.append(self._deaf_until)
        elif len(self._connections) < MAX_CONNECTIONS:
            poller.register(self._listener, select.POLLIN)
        for fd, connection in self._connections.items():
            poller.register(fd, connection.interest)
            if not connection.waiting:
                deadlines.append(connection.deadline)
        wait_ms = max(0, int((min(deadlines) - now) * 1000) + 1) if deadlines else None
        for fd, _ in poller.poll(wait_ms):
            if fd == self._alarm:
                os.read(fd, 4096)
                self._answer_swaps()
            elif fd == self._listener.fileno():
                self._accept()
            elif (ready := self._connections.get(fd)) is not None:
                self._go_on(ready)
        self._drop_late(time.monotonic())

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return  # it went away again
        except OSError as error:
            record(WARNING, "control_deaf", reason=error.strerror)
            self._deaf_until = time.monotonic() + _DEAF_SECONDS
            return
        if credentials(accepted).uid != os.geteuid():
            self.dropped.strangers += 1
            accepted.close()
            return
        accepted.setblocking(False)
        self._connections[accepted.fileno()] = _Connection(accepted, time.monotonic() + CLIENT_SECONDS)

    def _go_on(self, connection: _Connection) -> None:
        """Something can be read or written, or the client is gone."""
        try:
            if connection.to_send:
                self._send(connection)
            elif connection.waiting:
                self._drop(connection)  # nothing is asked for while a swap runs, so this is a hang-up
            elif data := connection.socket.recv(HEADER.size + MAX_REQUEST_BYTES + 1):
                connection.received += data
                self._read(connection)
            else:
                self._drop(connection, malformed=bool(connection.received))
        except BlockingIOError:
            return
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        """Obey the request once it is whole."""
        received = connection.received
        if len(received) < HEADER.size:
            return
        (length,) = HEADER.unpack_from(received)
        beyond = len(received) - HEADER.size - length
        if length > MAX_REQUEST_BYTES or beyond > 0:
            self._drop(connection, malformed=True)
        elif beyond == 0:
            try:
                request = decode_request(bytes(received[HEADER.size :]))
            except MalformedFrame:
                self._drop(connection, malformed=True)
            else:
                self._obey(connection, request)

    def _obey(self, connection: _Connection, request: Request) -> None:
        if isinstance(request, ReportStatus):
            self._reply(connection, self._report())
        elif self._swap is not None and self._swap.is_alive():
            busy = SpeclaneError("another swap is under way; try again when it is done")
            self._reply(connection, refusal(busy))
        else:
            swap = threading.Thread(
                target=self._run_swap, args=(connection, request), name="speclane-swap", daemon=True
            )
            try:
                swap.start()
            except RuntimeError as error:
                self._reply(connection, refusal(SpeclaneError(f"no thread for it: {error}")))
                return
            self._swap = swap
            connection.waiting = True

    def _report(self) -> Reply:
        try:
            return Reported(self._controlled.status(), Dropped(*astuple(self.dropped)))
        except Exception as error:  # noqa: BLE001  the thread's edge: the client hears of it, the thread lives on
            return refusal(error)

    def _answer_swaps(self) -> None:
        while self._swapped:
            connection, reply = self._swapped.popleft()
            if self._swap is not None:
                self._swap.join()  # it has only to end, and whoever is answered may ask for the next one
            if self._connections.get(connection.socket.fileno()) is connection:
                self._reply(connection, reply)

    def _reply(self, connection: _Connection, reply: Reply) -> None:
        connection.to_send = framed(reply)
        connection.deadline = time.monotonic() + CLIENT_SECONDS
        connection.waiting = False
        self._go_on(connection)

    def _send(self, connection: _Connection) -> None:
        connection.to_send = connection.to_send[connection.socket.send(connection.to_send) :]
        if not connection.to_send:
            self._drop(connection)  # served

    def _drop_late(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if not connection.waiting and now >= connection.deadline:
                self.dropped.late += 1
                self._drop(connection)

    def _drop(self, connection: _Connection, *, malformed: bool = False) -> None:
        self.dropped.malformed += malformed
        self._connections.pop(connection.socket.fileno(), None)
        connection.socket.close()

    # ------------------------------------------------------------ the swap's thread

    def _run_swap(self, connection: _Connection, request: SwapSpeculator) -> None:
        reply: Reply
        try:
            self._controlled.swap_speculator(request.model, request.seconds)
            reply = Swapped(self._controlled.speculation)
        except Exception as error:  # noqa: BLE001  the thread's edge: whoever asked for it hears of it
            reply = refusal(error)
        self._swapped.append((connection, reply))
        with self._lock:
            if not self._closing:
                os.write(self._call, b"!")
