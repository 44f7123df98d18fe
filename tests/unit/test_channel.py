"""Hub and peers over real sockets in one process, peers in threads of their own."""

from __future__ import annotations

import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import zmq

from ipc import codec
from ipc.channel import MAX_PATH_BYTES, Arrived, Garbled, Hub, Peer, Readable
from ipc.errors import MalformedFrame, PeerGone, WireError
from ipc.messages import Close, Draft, Drafted, DraftedItem, DraftItem, Failed, Stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "speculator/e1"


pytestmark = pytest.mark.usefixtures("leaves_nothing")


def soon() -> float:
    return time.monotonic() + 20.0


@contextmanager
def peer(hub: Hub, identity: str = NAME) -> Iterator[Peer]:
    """A peer that the hub has heard of, so that orders reach it."""
    it = Peer(hub.endpoint, identity)
    try:
        it.send(Failed("hello", "", ""))
        assert hub.receive(soon()) == Arrived(identity, Failed("hello", "", ""))
        yield it
    finally:
        it.close()


@contextmanager
def raw_peer(hub: Hub, identity: bytes = NAME.encode()) -> Iterator[zmq.Socket[bytes]]:
    """A dealer that may send anything at all."""
    with zmq.Context(io_threads=1) as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(hub.endpoint)
        yield socket


def test_orders_go_out_and_facts_come_back(hub: Hub):
    with peer(hub) as it:
        order = Draft("e1", 3, [DraftItem(0, 0, 5, [1, 2], 4)])
        hub.send(NAME, order)
        assert it.receive(soon()) == order
        fact = Drafted("e1", 3, [DraftedItem(0, 0, 5, [7, 8])], 1234)
        it.send(fact)
        assert hub.receive(soon()) == Arrived(NAME, fact)


def test_a_peer_in_another_thread_answers(hub: Hub):
    def serve() -> None:
        it = Peer(hub.endpoint, NAME)
        it.send(Failed("ready", "", ""))
        while not isinstance(order := it.receive(soon()), Stop):
            assert isinstance(order, Close)
            it.send(Drafted("e1", order.seqs[0], [], 0))
        it.close()

    thread = threading.Thread(target=serve)
    thread.start()
    hub.receive(soon())
    for number in range(500):
        hub.send(NAME, Close("e1", [number]))
        assert hub.receive(soon()) == Arrived(NAME, Drafted("e1", number, [], 0))
    hub.send(NAME, Stop("e1"))
    thread.join()


def test_messages_keep_their_order_and_their_sender(hub: Hub):
    with peer(hub, "target/a") as a, peer(hub, "speculator/b") as b:
        for number in range(100):
            a.send(Drafted("a", number, [], 0))
            b.send(Drafted("b", number, [], 0))
        seen: dict[str, list[int]] = {"target/a": [], "speculator/b": []}
        for _ in range(200):
            event = hub.receive(soon())
            assert isinstance(event, Arrived)
            seen[event.identity].append(event.fact.order)
        assert list(seen.values()) == [list(range(100))] * 2


def test_a_large_message_arrives_whole(hub: Hub):
    with peer(hub) as it:
        order = Close("e1", list(range(codec.MAX_ARRAY_LENGTH)))
        hub.send(NAME, order)
        assert it.receive(soon()) == order


@pytest.mark.parametrize("seconds", [-1.0, 0.0, 0.05])
def test_deadlines_are_kept(hub: Hub, seconds: float):
    with peer(hub) as it:
        for end in (hub, it):
            began = time.monotonic()
            assert end.receive(began + seconds) is None
            assert max(0.0, seconds) <= time.monotonic() - began < max(0.0, seconds) + 2.0


def test_an_order_to_a_stranger(hub: Hub):
    with pytest.raises(PeerGone, match="speculator/nobody takes no Stop"):
        hub.send("speculator/nobody", Stop("e"))


def test_a_peer_without_a_hub(directory: Path):
    it = Peer(f"ipc://{directory / 'nobody'}", NAME)
    began = time.monotonic()
    with pytest.raises(PeerGone, match="the coordinator takes no Failed"):
        it.send(Failed("e", "", ""))
    assert time.monotonic() - began < 5.0
    it.close()


def test_a_peer_that_takes_nothing_is_gone_after_a_second(hub: Hub):
    """Its queue, the hub's and the kernel's buffers fill up; the hub must not wait for ever."""
    with peer(hub):
        order = Close("e1", list(range(10_000)))

        def flood() -> None:
            while True:
                hub.send(NAME, order)

        with pytest.raises(PeerGone, match="takes no Close"):
            flood()


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"\xc1"], "FormatError"),
        ([b""], "incomplete"),
        ([codec.encode(Stop("e"))], "Stop"),
        ([b"one", b"two"], "2 frames instead of one"),
        ([b"", codec.encode(Failed("e", "", ""))], "2 frames instead of one"),
    ],
)
def test_what_is_no_fact_is_garbled_and_the_next_message_is_not(hub: Hub, frames: list[bytes], reason: str):
    with raw_peer(hub) as socket:
        socket.send_multipart(frames)
        event = hub.receive(soon())
        assert isinstance(event, Garbled)
        assert event.identity == NAME
        assert reason in event.reason
        socket.send(codec.encode(Failed("e", "", "")))
        assert hub.receive(soon()) == Arrived(NAME, Failed("e", "", ""))


def test_an_identity_that_is_no_text(hub: Hub):
    with raw_peer(hub, b"\xff\xfe") as socket:
        socket.send(codec.encode(Failed("e", "", "")))
        assert hub.receive(soon()) == Arrived("\ufffd\ufffd", Failed("e", "", ""))


def test_a_frame_beyond_the_cap_ends_the_connection_not_the_hub(hub: Hub):
    with raw_peer(hub, b"big") as big, peer(hub) as it:
        big.send(bytes(codec.MAX_FRAME_BYTES + 1))
        it.send(Failed("e", "", ""))
        assert hub.receive(soon()) == Arrived(NAME, Failed("e", "", ""))
        assert hub.receive(time.monotonic()) is None


def test_an_order_that_is_none(directory: Path):
    with zmq.Context(io_threads=1) as context, context.socket(zmq.ROUTER) as router:
        router.bind(f"ipc://{directory / 'hub'}")
        it = Peer(f"ipc://{directory / 'hub'}", NAME)
        it.send(Failed("e", "", ""))
        router.recv_multipart()
        for frames in ([b"\xc1"], [codec.encode(Failed("e", "", ""))], [b"", b""]):
            router.send_multipart([NAME.encode(), *frames])
            with pytest.raises(MalformedFrame):
                it.receive(soon())
        it.close()


def test_watched_descriptors_wake_the_hub(hub: Hub):
    reading, writing = os.pipe()
    try:
        hub.watch(reading)
        assert hub.receive(time.monotonic()) is None
        os.write(writing, b"!")
        assert hub.receive(soon()) == Readable(reading)
        assert hub.receive(soon()) == Readable(reading)  # until somebody reads it
        os.read(reading, 1)
        assert hub.receive(time.monotonic()) is None
        os.write(writing, b"!")
        hub.unwatch(reading)
        assert hub.receive(time.monotonic()) is None
        hub.unwatch(reading)  # once more does no harm
    finally:
        os.close(reading)
        os.close(writing)


def test_a_path_that_is_too_long(tmp_path: Path):
    deep = tmp_path / ("d" * MAX_PATH_BYTES)
    with pytest.raises(WireError, match=f"longer than {MAX_PATH_BYTES} bytes"):
        Hub(deep)


def test_a_directory_that_is_not_there(directory: Path):
    with pytest.raises(WireError, match="no socket at"):
        Hub(directory / "gone")


def test_many_hubs_and_peers_leave_nothing(directory: Path):
    for _ in range(20):
        hub = Hub(directory)
        with peer(hub):
            hub.send(NAME, Stop("e"))
        hub.close()
