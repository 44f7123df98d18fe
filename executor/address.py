"""Where a speculator server is: `ipc:///path/of/a/socket` on this host, or `tcp://HOST:PORT`. Pure."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

Attach = Literal["now", "later"]

SCHEMES = ("ipc://", "tcp://")
MAX_SERVERS = 8
_TCP = re.compile(r"tcp://(\[[0-9A-Fa-f:.]+\]|[^:/\[\]\s]*):([0-9]{1,5})")
_IPC = re.compile(r"ipc://(/[^\x00,]+)")
_WORKS = "ipc:///run/user/1000/speculator or tcp://127.0.0.1:7000"


@dataclass(frozen=True, slots=True)
class Address:
    """`text`: as ZeroMQ takes it. `local`: nobody on another host gets there."""

    text: str
    local: bool


class AttachPolicy(NamedTuple):
    """How an executor comes to the servers it is told of. `keys`: the directory of its own, None for none.
    `later`: it begins without a speculator if none of them serves yet."""

    keys: Path | None = None
    later: bool = False


def is_address(text: str) -> bool:
    """Whether this is meant to be addresses, and no model."""
    return text.startswith(SCHEMES)


def parse(text: str, field: str) -> Address:
    """Raises InvalidConfig about `field`. Without a host, a port is one of this host, by its loopback."""
    if found := _IPC.fullmatch(text):
        return Address(text, local=True)
    if (found := _TCP.fullmatch(text)) and int(found[2]) <= 65535:
        host = found[1] or "127.0.0.1"
        return Address(f"tcp://{'127.0.0.1' if host == 'localhost' else host}:{found[2]}", _loopback(host))
    raise InvalidConfig(field, f"{field} {text!r} is no address; try {_WORKS}")


def parse_several(text: str, field: str) -> list[Address]:
    """Addresses with commas between them. Raises InvalidConfig about `field`."""
    parts = [parse(part.strip(), field) for part in text.split(",")]
    if len(parts) > MAX_SERVERS:
        raise InvalidConfig(field, f"{field} names {len(parts)} servers; try at most {MAX_SERVERS}")
    if len(set(parts)) < len(parts):
        raise InvalidConfig(field, f"{field} {text!r} names a server twice; leave one of them out")
    for part in parts:
        if part.text.endswith(":0"):
            raise InvalidConfig(field, f"{field} {part.text} has no port; try {part.text[:-1]}7000")
    return parts


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
