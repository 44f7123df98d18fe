"""Speaks to running executors of this user: finds them, asks one, raises what it answers with."""

from __future__ import annotations

import os
import socket
import struct
import time
from typing import TYPE_CHECKING, NamedTuple

from executor.config import check_seconds
from executor.control_wire import (
    HEADER,
    MAX_REPLY_BYTES,
    Refused,
    Reported,
    ReportStatus,
    Swapped,
    SwapSpeculator,
    credentials,
    decode_reply,
    error_of,
    framed,
)
from executor.errors import InvalidConfig, SpeclaneError
from executor.rundir import bases, control_sockets
from ipc.errors import MalformedFrame

if TYPE_CHECKING:
    from pathlib import Path

    from executor.control_wire import Reply, Request

ANSWER_SECONDS = 5.0
_FETCH_SECONDS = 3600.0
"""A swap may first have to fetch a checkpoint, or wait for another process that does."""

_TIMEVAL = struct.Struct("@ll")


class Found(NamedTuple):
    """A running executor."""

    pid: int
    path: Path


def find() -> list[Found]:
    """All executors of this user that listen, by pid."""
    found = []
    for path in control_sockets():
        try:
            with _connected(path) as connection:
                pid, uid = credentials(connection)
        except OSError:
            continue  # another user's, or one whose owner is gone
        if uid == os.geteuid():
            found.append(Found(pid, path))
    return sorted(found)


def choose(pid: int | None) -> Found:
    """The executor of that pid, or the only one. Raises InvalidConfig about `pid`, or SpeclaneError: none."""
    running = find()
    if not running:
        places = ", ".join(str(base) for base in dict.fromkeys(bases()))
        raise SpeclaneError(f"no executor of yours is running (none has a socket in {places})")
    pids = ", ".join(str(each.pid) for each in running)
    chosen = [each for each in running if pid in (None, each.pid)]
    if not chosen:
        raise InvalidConfig("pid", f"pid {pid} is no executor of yours; running: {pids}")
    if len(chosen) > 1 and pid is not None:
        raise InvalidConfig(
            "pid", f"pid {pid} runs {len(chosen)} executors, which only its own Python code can tell apart"
        )
    if len(chosen) > 1:
        raise InvalidConfig("pid", f"pid must say which executor, since several are running: {pids}")
    return chosen[0]


def status(executor: Found) -> Reported:
    """Raises SpeclaneError if there is no answer."""
    reply = _ask(executor, ReportStatus(), ANSWER_SECONDS)
    if not isinstance(reply, Reported):
        raise _wrong(executor, reply)
    return reply


def swap_speculator(executor: Found, model: str, seconds: float) -> str:
    """What drafts then. `seconds`: for the new one to serve. Raises what LLM.swap_speculator does."""
    check_seconds("timeout", seconds, works=600.0)
    reply = _ask(executor, SwapSpeculator(model, seconds), _FETCH_SECONDS + seconds)
    if not isinstance(reply, Swapped):
        raise _wrong(executor, reply)
    return reply.speculation


def _ask(executor: Found, request: Request, seconds: float) -> Reply:
    """`seconds`: for the answer."""
    deadline = time.monotonic() + seconds
    try:
        with _connected(executor.path) as connection:
            connection.settimeout(seconds)
            connection.sendall(framed(request))
            (length,) = HEADER.unpack(_received(connection, HEADER.size, deadline))
            if length > MAX_REPLY_BYTES:
                raise MalformedFrame(f"frame of {length} bytes, limit {MAX_REPLY_BYTES}")
            reply = decode_reply(_received(connection, length, deadline))
    except TimeoutError as error:
        raise SpeclaneError(f"executor {executor.pid} gave no answer within {seconds:g} s") from error
    except OSError as error:
        raise SpeclaneError(f"executor {executor.pid} ended, or refused to answer: {error}") from error
    except MalformedFrame as error:
        raise SpeclaneError(
            f"executor {executor.pid} answers what this version does not know: {error}"
        ) from error
    if isinstance(reply, Refused):
        raise error_of(reply)
    return reply


def _connected(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        # While its queue is full, connecting waits only on a blocking socket, whose deadline is this option.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(ANSWER_SECONDS), 0))
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _received(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly so many bytes. Raises OSError: TimeoutError, or ConnectionError if there are no more."""
    data = bytearray()
    while len(data) < count:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("no answer")
        data += more
    return bytes(data)


def _wrong(executor: Found, reply: Reply) -> SpeclaneError:
    return SpeclaneError(f"executor {executor.pid} answered with {type(reply).__name__}")
