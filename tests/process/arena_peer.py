"""The importer of an arena as a process of its own: `python arena_peer.py FD TRANSPORT PATIENCE`.

Over the socket FD come an export (with the file of a memfd), then descriptors; back go acks, each as late as
PATIENCE further descriptors. Every tensor is looked at twice, when it comes and just before its ack, and must
be what its generation says both times: that is what a slot's content is made of.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_cuda import FakeCuda

from ipc import cuda
from ipc.arena import Arena, Importer
from ipc.messages import ArenaExport, Descriptor, Record, SlotRef

MAX_BYTES = 1 << 16


class Said(Record, frozen=True):
    """From the importer. `wrong`: tensors that were not what their generations say."""

    proved: bool
    acks: list[SlotRef]
    wrong: int
    export: ArenaExport | None = None


class Told(Record, frozen=True):
    """To the importer."""

    export: ArenaExport | None
    descriptors: list[Descriptor]


def content(ref: SlotRef, nbytes: int) -> bytes:
    """What a write of this generation to this slot consists of."""
    word = f"{ref.arena}/{ref.slot}/{ref.generation};".encode()
    return (word * (nbytes // len(word) + 1))[:nbytes]


def bytes_of(importer: Importer, descriptor: Descriptor) -> bytes:
    """Read where they are, not by the view that was cut before."""
    _, mapping = importer._open[descriptor.arena]
    return mapping.read(descriptor.offset, descriptor.nbytes)


def serve(line: socket.socket, transport: str, patience: int) -> None:
    importer = Importer()
    held: deque[Descriptor] = deque()
    while True:
        frame, fds, *_ = socket.recv_fds(line, MAX_BYTES, 1)
        if not frame:
            break
        told = msgspec.msgpack.decode(frame, type=Told)
        if told.export is not None:
            importer.open(told.export, *fds)
            importer.prove(told.export.arena)
            # And the other way round.
            back = Arena("back", "importer", 1 << 12, transport)
            passed = [back.fd] if back.fd >= 0 else []
            said = Said(True, [], 0, back.export)
            socket.send_fds(line, [msgspec.msgpack.encode(said)], passed)
            continue
        wrong = 0
        for descriptor in told.descriptors:
            importer.view(descriptor)
            wrong += bytes_of(importer, descriptor) != content(descriptor.ref, descriptor.nbytes)
            held.append(descriptor)
        acks = []
        while len(held) > patience or (held and not told.descriptors):
            due = held.popleft()
            wrong += bytes_of(importer, due) != content(due.ref, due.nbytes)
            acks += importer.ack(due)
        line.send(msgspec.msgpack.encode(Said(True, acks, wrong)))


if __name__ == "__main__":
    cuda.install(FakeCuda())
    with socket.socket(fileno=int(sys.argv[1])) as own:
        serve(own, sys.argv[2], int(sys.argv[3]))
