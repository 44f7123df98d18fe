"""Keys of a speculator server and its clients, as files: who may attach, and to whom (CURVE, by ZeroMQ).

    DIRECTORY/server/server.key          for the server: its pair
    DIRECTORY/server/clients/NAME.pub    … and whom it lets in
    DIRECTORY/NAME/client.key            for that client: its pair
    DIRECTORY/NAME/server.pub            … and whom it trusts

Each side gets its own directory and nothing else. A pair is two lines, public then secret key, in Z85; only
its owner can read it.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq

from ipc.errors import WireError

if TYPE_CHECKING:
    from pathlib import Path

SERVER = "server"
FIRST_CLIENT = "client"
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class KeyTrouble(WireError):
    """Keys are missing, broken, readable by others, or there already."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both in Z85. The secret one is in no text that this object makes of itself."""

    public: str
    secret: str

    def __repr__(self) -> str:
        return f"Pair({self.public})"


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """`clients`: names by public keys."""

    own: Pair
    clients: dict[str, str]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    own: Pair
    server: str


def make(directory: Path, clients: list[str]) -> list[Path]:
    """Write pairs for these clients, and for the server if it has none yet; the directories to hand out.

    Raises KeyTrouble for a name that cannot be or has keys already, OSError.
    """
    for name in clients:
        if not _NAME.fullmatch(name) or name == SERVER:
            raise KeyTrouble(f"client {name!r} must be a plain word other than {SERVER}; try gpu-7")
        if (directory / name).exists():
            raise KeyTrouble(f"{directory / name} is there already; remove it to make new keys for {name}")
    ours = directory / SERVER
    if not (ours / "server.key").exists():
        _private(directory, ours, ours / "clients")
        _write(ours / "server.key", *_pair())
    server = _read_pair(ours / "server.key")
    for name in clients:
        pair = _pair()
        theirs = directory / name
        _private(theirs)
        _write(theirs / "client.key", *pair)
        _write(theirs / "server.pub", server.public)
        _write(ours / "clients" / f"{name}.pub", pair[0])
    return [ours, *(directory / name for name in clients)]


def read_server(directory: Path) -> ServerKeys:
    """Raises KeyTrouble."""
    ours = _either(directory, SERVER, "server.key")
    clients = {_read(file)[0]: file.stem for file in sorted((ours / "clients").glob("*.pub"))}
    if not clients:
        raise KeyTrouble(f"{ours / 'clients'} lists nobody; try speclane keys DIR --client NAME")
    return ServerKeys(_read_pair(ours / "server.key"), clients)


def read_client(directory: Path) -> ClientKeys:
    """Raises KeyTrouble."""
    ours = _either(directory, FIRST_CLIENT, "client.key")
    return ClientKeys(_read_pair(ours / "client.key"), _read(ours / "server.pub")[0])


def _either(directory: Path, name: str, file: str) -> Path:
    """The directory of one side, or the part of that in which both were made."""
    for place in (directory, directory / name):
        if (place / file).exists():
            return place
    raise KeyTrouble(f"{directory} holds no {file}; make keys with: speclane keys {directory}")


def _pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _private(*directories: Path) -> None:
    for directory in directories:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _write(path: Path, *lines: str) -> None:
    """Never over something that is there, and never readable by others, not even for a moment."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as stream:
        stream.writelines(f"{line}\n" for line in lines)


def _read_pair(path: Path) -> Pair:
    public, *rest = _read(path, private=True)
    if len(rest) != 1:
        raise KeyTrouble(f"{path} holds no pair of keys; make new ones with: speclane keys DIR")
    return Pair(public, rest[0])


def _read(path: Path, *, private: bool = False) -> list[str]:
    try:
        if private and stat.S_IMODE(path.stat().st_mode) & 0o077:
            raise KeyTrouble(f"{path} can be read by others; try: chmod 600 {path}")
        lines = path.read_text(encoding="ascii", errors="replace").split()
    except OSError as error:
        raise KeyTrouble(f"{path}: {error.strerror}; make keys with: speclane keys DIR") from error
    if not lines or not all(map(_KEY.fullmatch, lines)):
        raise KeyTrouble(f"{path} holds no key; make new ones with: speclane keys DIR")
    return lines
