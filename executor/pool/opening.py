"""From options to a speculator server that can be run: its address, keys, model, and each client's share."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from executor.address import parse
from executor.config import MAX_SEQUENCES
from executor.errors import InvalidConfig
from executor.hidden_rows import ORDER_BYTES
from executor.model import server_spec
from executor.pool.server import SpeculatorServer
from ipc import keys
from ipc.codec import MAX_FRAME_BYTES
from ipc.door import Door
from ipc.errors import WireError
from ipc.messages import Offer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executor.address import Address
    from executor.config import Config
    from ipc.messages import LaneSpec

_TOKEN_BYTES = 9
_FRAME_BYTES = 1 << 20
"""Of a frame beside its tokens and hidden rows."""


@contextmanager
def opened(
    config: Config, bind: str, clients: int, progress: Callable[[str], None]
) -> Iterator[tuple[SpeculatorServer, Door]]:
    """A server and its door, at which nobody is answered before it serves. `config.keys`: the server's.

    Raises InvalidConfig before anything is loaded.
    """
    address = checked_address(config, bind, clients)
    its_keys = server_keys(config.keys) if config.keys is not None else None
    spec = server_spec(replace(config, max_sequences=config.max_sequences * clients), progress)
    try:
        door = Door(address.text, its_keys, max_frame(config, spec))
    except WireError as error:
        raise InvalidConfig("bind", f"bind: {error}; try another, such as tcp://127.0.0.1:0") from error
    try:
        yield SpeculatorServer(config, spec, offer(config, spec), door, clients), door
    finally:
        door.close()


def checked_address(config: Config, bind: str, clients: int) -> Address:
    """Where it is to serve so many clients. Raises InvalidConfig about `bind`, `keys` or `clients`."""
    address = parse(bind, "bind")
    if not address.local and config.keys is None:
        raise InvalidConfig(
            "keys",
            f"keys are needed to let other hosts in at {address.text}; try --keys DIR, made by: "
            "speclane keys DIR, or --bind tcp://127.0.0.1:7000",
        )
    if config.max_sequences * clients > MAX_SEQUENCES:
        raise InvalidConfig(
            "clients",
            f"clients: {clients} with {config.max_sequences} sequences each are too many; "
            f"try {MAX_SEQUENCES // config.max_sequences}, or fewer --max-sequences",
        )
    return address


def server_keys(directory: Path) -> keys.ServerKeys:
    """Raises InvalidConfig about `keys`."""
    try:
        return keys.read_server(directory)
    except WireError as error:
        raise InvalidConfig("keys", f"keys: {error}") from error


def offer(config: Config, spec: LaneSpec) -> Offer:
    """What clients are told: no path of this host."""
    head = msgspec.structs.replace(spec.head, file="") if spec.head is not None else None
    name = config.speculator if spec.engine == "toy" else Path(config.speculator).name
    return Offer(spec.engine, name, head)


def max_frame(config: Config, spec: LaneSpec) -> int:
    """Bytes of the longest order that a client within its share can have to send."""
    tokens = config.max_sequences * spec.max_model_len * _TOKEN_BYTES
    rows = ORDER_BYTES if spec.head is not None else 0
    return min(_FRAME_BYTES + tokens + rows, MAX_FRAME_BYTES)
