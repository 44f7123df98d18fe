"""Frames to messages and back: msgpack under caps, then a type check. Nothing is ever pickled.

Owns the limits on what a peer may send. Knows no socket.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, TypeVar, cast, get_args

import msgpack
import msgspec

from ipc.errors import MalformedFrame
from ipc.messages import Fact, Message, Order

if TYPE_CHECKING:
    from collections.abc import Mapping

Struct = TypeVar("Struct", bound=msgspec.Struct)

MAX_FRAME_BYTES = 16 << 20
MAX_ARRAY_LENGTH = 1 << 20
MAX_STRING_BYTES = 1 << 16
MAX_BINARY_BYTES = 8 << 20

_encoder = msgspec.msgpack.Encoder()

ORDERS: dict[str, type[Message]] = {struct.__name__: struct for struct in get_args(Order)}
FACTS: dict[str, type[Message]] = {struct.__name__: struct for struct in get_args(Fact)}


def encode(message: Message) -> bytes:
    """The msgpack frame of a message. Raises ValueError if it would pass MAX_FRAME_BYTES."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_FRAME_BYTES:
        raise ValueError(
            f"{type(message).__name__} of {len(frame)} bytes exceeds the frame limit of {MAX_FRAME_BYTES}"
        )
    return frame


def decode_order(frame: bytes) -> Order:
    """The order in a frame. Raises MalformedFrame."""
    return cast("Order", unpack(frame, ORDERS))


def decode_fact(frame: bytes) -> Fact:
    """The fact in a frame. Raises MalformedFrame."""
    return cast("Fact", unpack(frame, FACTS))


def unpack(
    frame: bytes,
    legal: Mapping[str, type[Struct]],
    max_bytes: int = MAX_FRAME_BYTES,
    max_array_length: int = MAX_ARRAY_LENGTH,
) -> Struct:
    """The struct in a frame, one of `legal` by its tag. Raises MalformedFrame."""
    if len(frame) > max_bytes:
        raise MalformedFrame(f"frame of {len(frame)} bytes, limit {max_bytes}")
    try:
        # No message contains a map or ext value, so none of them is allowed to begin with. Arrays
        # become tuples, which are smaller and share the empty one: a frame must not cost many times its size.
        raw = msgpack.unpackb(
            frame,
            raw=False,
            use_list=False,
            object_hook=_refuse_map,
            strict_map_key=True,
            max_str_len=MAX_STRING_BYTES,
            max_array_len=max_array_length,
            max_map_len=0,
            max_bin_len=MAX_BINARY_BYTES,
            max_ext_len=0,
        )
        # Converting to one struct is several times cheaper than to the union of all.
        return msgspec.convert(raw, type=legal[raw[0]], strict=True)
    except (
        msgspec.ValidationError,
        msgpack.exceptions.UnpackException,
        ValueError,
        LookupError,
        TypeError,
    ) as error:
        raise MalformedFrame(f"{type(error).__name__}: {error}") from error


def _refuse_map(_: object) -> NoReturn:
    # The cap on lengths lets empty maps pass, and a million of them fit into a megabyte.
    raise ValueError("a map, which no message contains")
