"""A worker that misbehaves in one chosen way: `python fake_worker.py BEHAVIOUR` and a worker's own options.

Up to its fault it follows the protocol, so that what is tested is the fault. As a speculator it always
proposes token 1, as a target it always samples it.
"""

from __future__ import annotations

import argparse
import os
import pickle
import signal
import sys
import time
from typing import TYPE_CHECKING

from ipc.channel import Peer
from ipc.messages import (
    WIRE_VERSION,
    Configure,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Failed,
    Greeted,
    Loaded,
    MemoryProfile,
    Open,
    Profiled,
    Ready,
    Stop,
    Verified,
    VerifiedItem,
    Verify,
    VerifyItem,
    Vocabulary,
)
from workers import guard

if TYPE_CHECKING:
    from collections.abc import Callable

    from ipc.messages import Fact, Order

VOCABULARY = 256
PROFILE = MemoryProfile(
    device="cpu",
    device_id="cpu",
    process=1 << 20,
    weights=0,
    activations=0,
    workspace=0,
    graphs=0,
    load_peak=1 << 20,
    kv_bytes_per_token=8,
    kv_block=1,
    max_kv_tokens=8 * 4096,
    free=1 << 30,
    held=1 << 20,
)


class FakeWorker:
    def __init__(self, behaviour: str, lane: str, epoch: str, endpoint: str) -> None:
        self.behaviour = behaviour
        self.lane = lane
        self.epoch = epoch
        self.peer = Peer(endpoint, f"{lane}/{epoch}")

    def run(self) -> None:
        self.greet()
        while not isinstance(self.next_order(), Configure):
            pass
        if self.behaviour == "fails at load":
            self.peer.send(Failed(self.epoch, "load", "no such weights"))
            hang()
        self.peer.send(Loaded(self.epoch, "cpu"))
        self.next_order()
        self.peer.send(Profiled(self.epoch, PROFILE))
        self.next_order()
        self.peer.send(Ready(self.epoch, self.vocabulary(), 8 if self.behaviour == "small" else 4096, []))
        while True:
            match self.next_order():
                case Stop():
                    if self.behaviour == "deaf":
                        hang()
                    self.peer.close()
                    return
                case Open() if self.behaviour == "fails when told":
                    self.peer.send(Failed(self.epoch, "memory", "no room"))
                    hang()
                case Draft() as order:
                    self.answer(
                        order, Drafted(self.epoch, order.order, [proposal(i) for i in order.items], 0)
                    )
                case Verify() as order:
                    self.answer(
                        order, Verified(self.epoch, order.order, [verdict(i) for i in order.items], 0)
                    )

    def vocabulary(self) -> Vocabulary:
        if self.behaviour == "another vocabulary":
            return Vocabulary(VOCABULARY + 1, "another")
        return Vocabulary(0, "") if self.lane == "speculator" else Vocabulary(VOCABULARY, "")

    def greet(self) -> None:
        match self.behaviour:
            case "dies at boot":
                sys.exit("the fake worker was told to die")
            case "exits at boot":
                sys.exit(0)
            case "never greets":
                hang()
            case "garbage at boot":
                self.send_raw(b"\xc1")
                hang()
        version = WIRE_VERSION + (self.behaviour == "another wire version")
        other = {"target": "speculator", "speculator": "target"}[self.lane]
        lane = other if self.behaviour == "greets as the other" else self.lane
        self.peer.send(Greeted(self.epoch, version, lane, os.getpid()))

    def answer(self, order: Draft | Verify, honest: Drafted | Verified) -> None:
        fault = FAULTS.get(self.behaviour)
        if fault is not None:
            fault(self, honest)
            return
        self.peer.send(honest)

    def next_order(self) -> Order:
        while (order := self.peer.receive(time.monotonic() + 60.0)) is None:
            pass
        return order

    def send_raw(self, *frames: bytes) -> None:
        self.peer._socket.send_multipart(frames)


def proposal(item: DraftItem) -> DraftedItem:
    return DraftedItem(item.seq, item.gen, item.base_len, [1] * item.k)


def verdict(item: VerifyItem) -> VerifiedItem:
    return VerifiedItem(item.seq, item.gen, item.base_len, 0, 1, [])


def hang() -> None:
    while True:
        signal.pause()


def items(make: Callable[..., object]) -> Callable[[FakeWorker, Drafted | Verified], None]:
    """A fault in the items of an answer, each made anew from the honest one's fields."""

    def answer(worker: FakeWorker, honest: Drafted | Verified) -> None:
        made = [make(item) for item in honest.items]
        worker.peer.send(type(honest)(honest.epoch, honest.order, [i for i in made if i is not None], 0))

    return answer


def send(make: Callable[[Drafted | Verified], Fact], then_hang: bool = False):
    def answer(worker: FakeWorker, honest: Drafted | Verified) -> None:
        worker.peer.send(make(honest))
        if then_hang:
            hang()

    return answer


def raw(*frames: bytes) -> Callable[[FakeWorker, Drafted | Verified], None]:
    def answer(worker: FakeWorker, honest: Drafted | Verified) -> None:
        worker.send_raw(*frames)
        hang()

    return answer


def past_epoch_first(worker: FakeWorker, honest: Drafted | Verified) -> None:
    worker.peer.send(type(honest)("past", honest.order, honest.items, 0))
    worker.peer.send(honest)


def answer_twice(worker: FakeWorker, honest: Drafted | Verified) -> None:
    worker.peer.send(honest)
    worker.peer.send(honest)


def shout(worker: FakeWorker, honest: Drafted | Verified) -> None:
    """More than any pipe holds, before each answer."""
    os.write(2, b"noise " * (1 << 18))
    worker.peer.send(honest)


FAULTS: dict[str, Callable[[FakeWorker, Drafted | Verified], None]] = {
    "garbage": raw(b"\xc1"),
    "a pickle": raw(pickle.dumps({"proposal": [1]})),
    "two frames": raw(b"", b""),
    "huge claim": raw(b"\xdd\xff\xff\xff\xff"),
    "past epoch": past_epoch_first,
    "past order": send(lambda honest: type(honest)(honest.epoch, honest.order - 1, honest.items, 0)),
    "answers twice": answer_twice,
    "fails": send(lambda honest: Failed(honest.epoch, "memory", "out of memory"), then_hang=True),
    "answers as the other": send(
        lambda honest: (Verified if isinstance(honest, Drafted) else Drafted)(
            honest.epoch, honest.order, [], 0
        )
    ),
    "past generation": items(lambda i: DraftedItem(i.seq, i.gen - 1, i.base_len, i.tokens)),
    "past length": items(lambda i: DraftedItem(i.seq, i.gen, i.base_len - 1, i.tokens)),
    "strange sequence": items(lambda i: DraftedItem(i.seq + 1000, i.gen, i.base_len, i.tokens)),
    "too many tokens": items(lambda i: DraftedItem(i.seq, i.gen, i.base_len, [*i.tokens, 1])),
    "foreign token": items(lambda i: DraftedItem(i.seq, i.gen, i.base_len, [VOCABULARY])),
    "negative token": items(lambda i: DraftedItem(i.seq, i.gen, i.base_len, [-1])),
    "no items": items(lambda i: None),
    "empty drafts": items(lambda i: DraftedItem(i.seq, i.gen, i.base_len, [])),
    "shouts": shout,
    "verdict of another generation": items(lambda i: VerifiedItem(i.seq, i.gen + 1, i.base_len, 0, 1, [])),
    "verdict of another length": items(lambda i: VerifiedItem(i.seq, i.gen, i.base_len + 1, 0, 1, [])),
    "accepts more than was drafted": items(lambda i: VerifiedItem(i.seq, i.gen, i.base_len, 99, 1, [])),
    "accepts less than nothing": items(lambda i: VerifiedItem(i.seq, i.gen, i.base_len, -1, 1, [])),
    "samples a foreign token": items(lambda i: VerifiedItem(i.seq, i.gen, i.base_len, 0, VOCABULARY, [])),
    "no verdict": items(lambda i: None),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("behaviour")
    parser.add_argument("--lane")
    parser.add_argument("--epoch")
    parser.add_argument("--endpoint")
    parser.add_argument("--parent-pid", type=int)
    parser.add_argument("--death-fd", type=int)
    args = parser.parse_args()
    guard.die_with(args.parent_pid, args.death_fd)
    FakeWorker(args.behaviour, args.lane, args.epoch, args.endpoint).run()


if __name__ == "__main__":
    main()
