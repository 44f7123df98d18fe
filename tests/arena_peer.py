"""The other lane of an arena as a process of its own, and the test's end of it.

Run as `python arena_peer.py FD TRANSPORT PATIENCE NBYTES DEVICE`: over the socket FD come an export (with the
file of a memfd), then descriptors; back go acks, each as late as PATIENCE further descriptors. A tensor is
looked at twice, when it comes and just before its ack, and must be what its generation says both times: that
is what a slot's content is made of. It has an arena of NBYTES of its own, too. DEVICE is a GPU's UUID for the
real CUDA runtime, or `cpu` for the fake one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque

import msgspec
from fake_cuda import FakeCuda

from ipc import cuda
from ipc.arena import Arena, Importer
from ipc.messages import ArenaExport, Descriptor, Record, SlotRef

MAX_BYTES = 1 << 16
SECONDS = 60.0


class Said(Record, frozen=True):
    """From the importer. `wrong`: tensors that were not what their generations say."""

    proved: bool
    acks: list[SlotRef]
    wrong: int
    export: ArenaExport | None = None
    descriptor: Descriptor | None = None


class Told(Record, frozen=True):
    """To the importer. `write`: so many bytes to its own arena, in the place of what it wrote last."""

    export: ArenaExport | None
    descriptors: list[Descriptor]
    write: int = 0


def content(ref: SlotRef, nbytes: int) -> bytes:
    """What a write of this generation to this slot consists of."""
    word = f"{ref.arena}/{ref.slot}/{ref.generation};".encode()
    return (word * (nbytes // len(word) + 1))[:nbytes]


def publish(arena: Arena, nbytes: int) -> Descriptor | None:
    """What a write there should consist of; None if there is no room."""
    slot = arena.reserve(nbytes)
    if slot is None:
        return None
    ref = SlotRef(arena.export.arena, slot.number, slot.generation)
    arena._memory.write(slot.offset, content(ref, nbytes))
    return arena.publish(slot, "uint8", (nbytes,))


class Peer:
    """The test's end. It is the exporter, mostly."""

    def __init__(self, transport: str, patience: int, nbytes: int = 1 << 12, device_id: str = "cpu") -> None:
        self.line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.line.settimeout(SECONDS)
        self.file: int | None = None
        command = [sys.executable, __file__, str(theirs.fileno()), transport, str(patience), str(nbytes)]
        with theirs:
            self.process = subprocess.Popen([*command, device_id], pass_fds=(theirs.fileno(),))

    def import_(self, arena: Arena) -> Said:
        """What it says of itself; the file of its own arena lies in `file` until somebody takes it."""
        files = [arena.fd] if arena.fd >= 0 else []
        socket.send_fds(self.line, [msgspec.msgpack.encode(Told(arena.export, []))], files)
        arena.forget_fd()
        frame, fds, *_ = socket.recv_fds(self.line, MAX_BYTES, 1)
        self.file = fds[0] if fds else None
        return msgspec.msgpack.decode(frame, type=Said)

    def open_its_arena(self, said: Said) -> Importer:
        assert said.export is not None
        importer = Importer()
        file, self.file = self.file, None
        importer.open(said.export, file)
        importer.prove(said.export.arena)
        return importer

    def show(self, descriptors: list[Descriptor]) -> None:
        self.line.send(msgspec.msgpack.encode(Told(None, descriptors)))

    def write(self, nbytes: int) -> Descriptor:
        """Have it write, in place of what it wrote last."""
        self.line.send(msgspec.msgpack.encode(Told(None, [], nbytes)))
        descriptor = self.hear().descriptor
        assert descriptor is not None
        return descriptor

    def hear(self) -> Said:
        return msgspec.msgpack.decode(self.line.recv(MAX_BYTES), type=Said)

    def close(self) -> None:
        self.line.close()
        if self.file is not None:
            os.close(self.file)
        self.process.kill()
        self.process.wait()


# ---------------------------------------------------------------- the process


def bytes_of(importer: Importer, descriptor: Descriptor) -> bytes:
    """Read where they are, not by the view that was cut before."""
    _, mapping = importer._open[descriptor.arena]
    return mapping.read(descriptor.offset, descriptor.nbytes)


def serve(line: socket.socket, transport: str, patience: int, nbytes: int, device_id: str) -> None:
    importer = Importer()
    back: Arena | None = None
    written: Descriptor | None = None
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
            back = Arena("back", "importer", nbytes, transport, device_id)
            passed = [back.fd] if back.fd >= 0 else []
            said = Said(True, [], 0, back.export)
            socket.send_fds(line, [msgspec.msgpack.encode(said)], passed)
            continue
        if told.write:
            assert back is not None
            back.release([written.ref] if written is not None else [])
            written = publish(back, told.write)
            line.send(msgspec.msgpack.encode(Said(True, [], 0, None, written)))
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
    fd, its_transport, its_patience, its_nbytes, its_device = sys.argv[1:]
    if its_device == "cpu":
        cuda.install(FakeCuda())
    with socket.socket(fileno=int(fd)) as own:
        serve(own, its_transport, int(its_patience), int(its_nbytes), its_device)
