"""Whether a speculator server answers: a knock at its door that leaves nothing behind."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import zmq

from ipc import codec
from ipc.channel import limited
from ipc.errors import WireError
from ipc.messages import Attach, Greeted

if TYPE_CHECKING:
    from ipc.keys import ClientKeys
    from ipc.messages import Fact

_NO_VERSION = 0
"""Of the wire. A server tells its own to whoever speaks another, and does not take him for a client."""


def ping(address: str, keys: ClientKeys | None, seconds: float) -> Greeted:
    """How it greets: its process and wire version. Raises WireError if it does not within so long."""
    context = zmq.Context(io_threads=1)
    try:
        socket = limited(context.socket(zmq.DEALER))
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.IDENTITY, f"ping/{uuid.uuid4().hex}".encode())
        if keys is not None:
            socket.curve_publickey = keys.own.public.encode()
            socket.curve_secretkey = keys.own.secret.encode()
            socket.curve_serverkey = keys.server.encode()
        for limit in (zmq.SNDTIMEO, zmq.RCVTIMEO):
            socket.setsockopt(limit, int(seconds * 1000))
        socket.connect(address)
        socket.send(codec.encode(Attach("ping", _NO_VERSION, "ping")))  # once there is a connection
        answer: Fact = codec.decode_fact(socket.recv())
    except zmq.Again:
        raise WireError(f"no speculator server answers at {address} within {seconds:g} s") from None
    except zmq.ZMQError as error:
        raise WireError(f"{address} cannot be reached: {error}") from error
    finally:
        context.destroy(linger=0)
    if not isinstance(answer, Greeted):
        raise WireError(f"{address} answers with {type(answer).__name__}, as no speculator server does")
    return answer
