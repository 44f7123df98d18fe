"""The wire between a hub and a speculator server: who is let in, whom it takes, and how it ends.

Real sockets, and a server that says what the test tells it to.
"""

from __future__ import annotations

import stat
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from ipc import codec, keys
from ipc.channel import Arrived, Garbled, Hub
from ipc.door import Door
from ipc.errors import WireError
from ipc.messages import (
    WIRE_VERSION,
    Attach,
    Close,
    Configure,
    Draft,
    Failed,
    Greeted,
    LaneSpec,
    Loaded,
    Progressed,
    Stop,
)
from ipc.relay import GOODBYE, Errand, Relay

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "speculator/e"
CALLER = f"{NAME}/1"
CAP = 1 << 20
SECONDS = 20.0


pytestmark = pytest.mark.usefixtures("leaves_nothing")


@contextmanager
def door(address: str = "tcp://127.0.0.1:0", its: keys.ServerKeys | None = None) -> Iterator[Door]:
    it = Door(address, its, CAP)
    try:
        yield it
    finally:
        it.close()


class Running:
    """A relay in its thread."""

    def __init__(self, hub: Hub, *addresses: str, own: keys.ClientKeys | None = None, fast: bool = True):
        self.relay = Relay(hub, Errand(NAME, "e", "me", addresses, own, fast, "or do without"))
        self.reason: str | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.reason = self.relay.run()

    def end(self) -> str:
        """Why it ended, by itself."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()
        self.relay.close()
        assert self.reason is not None
        return self.reason

    def stop(self) -> None:
        self.relay.stop()
        self.end()


def soon() -> float:
    return time.monotonic() + SECONDS


def heard(hub: Hub):
    event = hub.receive(soon())
    assert isinstance(event, Arrived), event
    assert event.identity == NAME
    return event.fact


def knocks(door: Door, count: int = 1) -> list:
    """What is said at a door; who asks to come in is answered meanwhile."""
    found = []
    deadline = soon()
    while len(found) < count:
        assert time.monotonic() < deadline
        door.admit()
        found += [knock.frame and codec.decode_order(knock.frame) for knock in door.receive()]
        time.sleep(0.001)
    return found


def take(door: Door, hub: Hub, caller: str = CALLER) -> None:
    """The relay is attached at this door."""
    assert knocks(door) == [Attach("e", WIRE_VERSION, "me")]
    door.send(caller, codec.encode(Greeted("e", WIRE_VERSION, "speculator", 1)))
    assert heard(hub) == Greeted("e", WIRE_VERSION, "speculator", 1)


def test_what_either_side_says_reaches_the_other_unread(hub):
    with door() as server:
        running = Running(hub, server.address)
        take(server, hub)
        orders = [
            Configure("e", LaneSpec("speculator", "remote", "x", "bf16", "cpu", 1, 1, 64)),
            Close("e", [1]),
            Draft("e", 1, []),
        ]
        for order in orders:
            hub.send(NAME, order)
        assert knocks(server, 3) == orders
        for fact in (Loaded("e", "d"), Progressed("e", 1)):
            server.send(CALLER, codec.encode(fact))
            assert heard(hub) == fact
        server.send(CALLER, b"\xc1")
        assert isinstance(hub.receive(soon()), Garbled)
        hub.send(NAME, Stop("e"))
        assert knocks(server) == [Stop("e")]
        server.send(CALLER, GOODBYE)
        assert running.end() == ""
        assert not running.relay.stopped


def test_who_is_stopped_says_goodbye(hub):
    with door() as server:
        running = Running(hub, server.address)
        take(server, hub)
        running.stop()
        assert knocks(server) == [GOODBYE]


def test_a_lost_connection_is_the_end(hub):
    with door() as server:
        running = Running(hub, server.address)
        take(server, hub)
    failed = Failed("e", "internal", f"the connection to {server.address} is lost")
    assert heard(hub) == failed
    assert running.end() == failed.message


def test_no_server(hub, directory):
    with door() as server:
        gone = server.address
    running = Running(hub, gone, f"ipc://{directory}/none")
    failed = heard(hub)
    assert failed.kind == "configuration"
    assert running.end() == failed.message
    advice = "start one: speclane speculator --bind ADDRESS"
    assert failed.message == (
        f"no speculator server at {gone}; {advice}; "
        f"no speculator server at ipc://{directory}/none; {advice}; or do without"
    )


def test_the_first_that_serves_takes_it(hub):
    with door() as first, door() as second:
        with door() as gone:
            pass
        running = Running(hub, gone.address, first.address, second.address)
        assert knocks(first) == [Attach("e", WIRE_VERSION, "me")]
        first.send(f"{NAME}/2", codec.encode(Failed("e", "configuration", "is full")))
        take(second, hub, f"{NAME}/3")
        assert running.relay.address == second.address
        assert knocks(first) == [GOODBYE]
        running.stop()


def test_a_server_that_is_silent_is_passed_over_for_one_that_serves(hub):
    with door() as silent, door() as second:
        running = Running(hub, silent.address, second.address)
        take(second, hub, f"{NAME}/2")
        assert knocks(silent, 2) == [Attach("e", WIRE_VERSION, "me"), GOODBYE]
        running.stop()


def test_who_has_been_served_waits_for_the_server_to_come_back(hub, directory):
    address = f"ipc://{directory}/s"
    running = Running(hub, address, fast=False)
    while running.relay.calls < 2:
        time.sleep(0.001)
    with door(address) as server:
        assert knocks(server) == [Attach("e", WIRE_VERSION, "me")]
        running.stop()


@pytest.mark.parametrize("attached", [False, True])
def test_a_lane_that_is_not_wanted_any_more_waits_for_nobody(hub, directory, attached):
    """Before a server has greeted, all that the coordinator can say is Stop."""
    address = f"ipc://{directory}/s"
    with door(address) if attached else contextmanager(lambda: iter([None]))():
        running = Running(hub, address, fast=False)
        deadline = soon()
        while time.monotonic() < deadline:
            try:
                hub.send(NAME, Stop("e"))
                break
            except WireError:
                continue
        assert running.end() == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [(codec.encode(Progressed("e", 1)), "began with Progressed"), (b"\xc1", "speaks another language")],
)
def test_a_server_that_says_something_else_first(hub, words, reason):
    with door() as server:
        running = Running(hub, server.address)
        knocks(server)
        server.send(CALLER, words)
        assert reason in heard(hub).message
        running.end()


# ---------------------------------------------------------------- keys


@pytest.fixture
def pairs(tmp_path: Path) -> tuple[keys.ServerKeys, keys.ClientKeys]:
    keys.make(tmp_path, ["alice"])
    return keys.read_server(tmp_path), keys.read_client(tmp_path / "alice")


def test_who_is_listed_comes_in_by_name(hub, pairs):
    server_keys, own = pairs
    with door(its=server_keys) as server:
        running = Running(hub, server.address, own=own)
        found = []
        while not found:
            server.admit()
            found = list(server.receive())
            time.sleep(0.001)
        assert [(knock.identity, knock.user) for knock in found] == [(CALLER, "alice")]
        running.stop()


def answering(server: Door, running: Running) -> str:
    """What becomes of who knocks, while the door is kept."""
    deadline = soon()
    while running.reason is None and time.monotonic() < deadline:
        server.admit()
        assert list(server.receive()) == []
        time.sleep(0.001)
    return running.end()


def test_who_is_not_listed_does_not(hub, pairs, tmp_path):
    keys.make(tmp_path / "others", ["mallory"])
    stranger = keys.read_client(tmp_path / "others" / "mallory")
    server_keys, own = pairs
    with door(its=server_keys) as server:
        running = Running(hub, server.address, own=keys.ClientKeys(stranger.own, own.server))
        assert "does not list this client's key" in answering(server, running)


def test_a_client_trusts_only_the_server_that_it_knows(hub, pairs, tmp_path):
    keys.make(tmp_path / "others", ["x"])
    server_keys, own = pairs
    with door(its=server_keys) as server:
        running = Running(
            hub,
            server.address,
            own=keys.ClientKeys(own.own, keys.read_client(tmp_path / "others" / "x").server),
        )
        assert "another key than this client trusts" in answering(server, running)


@pytest.mark.parametrize("server_has_them", [True, False])
def test_keys_on_one_side_only(hub, pairs, server_has_them):
    server_keys, own = pairs
    with door(its=server_keys if server_has_them else None) as server:
        running = Running(hub, server.address, own=None if server_has_them else own)
        reason = answering(server, running)
    assert ("it may want --keys" if server_has_them else "another key than this client trusts") in reason


# ---------------------------------------------------------------- the door


def test_only_its_owner_comes_to_a_socket_of_a_server(directory):
    with door(f"ipc://{directory}/s"):
        assert stat.S_IMODE((directory / "s").stat().st_mode) == 0o600


def test_an_address_that_is_taken_is_not_taken_away(directory):
    address = f"ipc://{directory}/s"
    with door(address), pytest.raises(WireError, match="a server runs there already"):
        Door(address, None, CAP)
    with door() as first, pytest.raises(WireError, match="cannot be bound: Address already in use"):
        Door(first.address, None, CAP)


def test_a_socket_that_a_dead_server_left_is_no_hindrance_but_a_file_is(directory):
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory / "s"))
    with door(f"ipc://{directory}/s"):
        pass
    (directory / "s").unlink(missing_ok=True)
    (directory / "s").write_text("mine")
    with pytest.raises(WireError, match="is there already, and is no socket"):
        Door(f"ipc://{directory}/s", None, CAP)
    assert (directory / "s").read_text() == "mine"


def test_nothing_is_kept_for_a_client_that_is_gone(hub):
    with door() as server:
        assert not server.send(CALLER, b"x")
        running = Running(hub, server.address)
        take(server, hub)
        running.stop()
        knocks(server)
        deadline = soon()
        while server.send(CALLER, b"x"):
            assert time.monotonic() < deadline
