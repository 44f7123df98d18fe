"""What is said over an executor's control socket: one request, one reply, each a length and a msgpack frame.

The length is 4 bytes, big-endian. Both ends trust a peer of their own user to exist, and nothing it sends.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal, NamedTuple, cast

import msgspec

from executor.errors import Closed, InvalidConfig, LaneFailed, SpeclaneError
from executor.status import Record, Status
from ipc.codec import unpack

HEADER = struct.Struct(">I")
MAX_REQUEST_BYTES = 8 << 10
MAX_REPLY_BYTES = 64 << 10
_MAX_ARRAY_LENGTH = 64
_MAX_MESSAGE_CHARACTERS = 4000
_CREDENTIALS = struct.Struct("3i")


class Exchange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag=True):
    """Base of requests and replies: an array of its name and its fields."""


# ---------------------------------------------------------------- requests


class ReportStatus(Exchange, frozen=True):
    """Answered by Reported."""


class SwapSpeculator(Exchange, frozen=True):
    """`off`, `ngram` or a model, which has so many seconds to serve. Answered by Swapped when it does."""

    model: str
    seconds: float | None


# ---------------------------------------------------------------- replies


class Dropped(Record, frozen=True):
    """Connections that got no answer: of other users, with what is no request, silent for too long."""

    strangers: int = 0
    malformed: int = 0
    late: int = 0


class Reported(Exchange, frozen=True):
    status: Status
    dropped: Dropped


class Swapped(Exchange, frozen=True):
    """What drafts now."""

    speculation: str


class Refused(Exchange, frozen=True):
    """The error that a request met; `subject` is an InvalidConfig's field or a LaneFailed's lane."""

    error: Literal["InvalidConfig", "LaneFailed", "Closed", "SpeclaneError"]
    subject: str
    message: str
    details: str


Request = ReportStatus | SwapSpeculator
Reply = Reported | Swapped | Refused

_REQUESTS: dict[str, type[Exchange]] = {kind.__name__: kind for kind in (ReportStatus, SwapSpeculator)}
_REPLIES: dict[str, type[Exchange]] = {kind.__name__: kind for kind in (Reported, Swapped, Refused)}
_encoder = msgspec.msgpack.Encoder()


def framed(exchange: Exchange) -> bytes:
    body = _encoder.encode(exchange)
    return HEADER.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Raises MalformedFrame."""
    return cast("Request", unpack(body, _REQUESTS, MAX_REQUEST_BYTES, _MAX_ARRAY_LENGTH))


def decode_reply(body: bytes) -> Reply:
    """Raises MalformedFrame."""
    return cast("Reply", unpack(body, _REPLIES, MAX_REPLY_BYTES, _MAX_ARRAY_LENGTH))


# ---------------------------------------------------------------- errors


def refusal(error: Exception) -> Refused:
    """An error as a reply."""
    match error:
        case InvalidConfig():
            return _refused("InvalidConfig", str(error), subject=error.field)
        case LaneFailed():
            return _refused("LaneFailed", error.reason, subject=error.lane, details=error.stderr_tail)
        case Closed():
            return _refused("Closed", str(error))
        case SpeclaneError():
            return _refused("SpeclaneError", str(error))
        case _:
            return _refused("SpeclaneError", f"internal error: {type(error).__name__}: {error}")


def error_of(refused: Refused) -> SpeclaneError:
    """The error that it was."""
    match refused.error:
        case "InvalidConfig":
            return InvalidConfig(refused.subject, refused.message)
        case "LaneFailed":
            return LaneFailed(refused.subject, refused.message, refused.details)
        case "Closed":
            return Closed(refused.message)
        case "SpeclaneError":
            return SpeclaneError(refused.message)


def _refused(
    error: Literal["InvalidConfig", "LaneFailed", "Closed", "SpeclaneError"],
    message: str,
    subject: str = "",
    details: str = "",
) -> Refused:
    return Refused(error, subject, _sendable(message), _sendable(details))


def _sendable(text: str) -> str:
    return text[:_MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode()


# ---------------------------------------------------------------- peers


class Credentials(NamedTuple):
    """Who made the other end: process and user, as the kernel knows them."""

    pid: int
    uid: int


def credentials(connection: socket.socket) -> Credentials:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    return Credentials(pid, uid)
