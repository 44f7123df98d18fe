"""A device whose memory, addresses and graphs are simulated: what a GPU does to those who break the rules.

Freed addresses are handed out again, lowest first. A graph replays at the addresses it was captured with:
that is an illegal access where nothing is mapped, and silent corruption where somebody else is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from workers.device import Memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.workspace import Spec

BASE = 0x10000
ALIGNMENT = 256


class IllegalAccess(Exception):
    """Nothing is mapped there."""


class Byte(NamedTuple):
    """The only element type: views are runs of bytes that all hold one value."""

    itemsize: int = 1


@dataclass(frozen=True)
class FakeView:
    device: FakeDevice
    address: int
    nbytes: int

    def fill(self, value: int) -> None:
        self.device.execute("fill", self, None, value)

    def copy(self, source: FakeView, plus: int = 0) -> None:
        """Each byte becomes the source's first one plus `plus`."""
        self.device.execute("copy", self, source, plus)

    @property
    def value(self) -> int:
        """Of all its bytes; -1 if they differ, as after somebody else wrote into them."""
        content = self.device.read(self)
        return content[0] if len(set(content)) == 1 else -1


@dataclass(frozen=True)
class FakeStorage:
    device: FakeDevice
    address: int
    nbytes: int

    def view(self, offset: int, spec: Spec) -> FakeView:
        assert offset + spec.nbytes <= self.nbytes
        return FakeView(self.device, self.address + offset, spec.nbytes)

    def fill(self, byte: int) -> None:
        FakeView(self.device, self.address, self.nbytes).fill(byte)


@dataclass
class Pool:
    """What graphs of it allocated; a later one uses what is large enough."""

    storages: list[FakeStorage] = field(default_factory=list)
    graphs: int = 0


class FakeGraph:
    def __init__(self, device: FakeDevice, pool: Pool, operations: list[tuple]) -> None:
        self.device = device
        self.pool = pool
        self.operations = operations
        pool.graphs += 1

    def replay(self) -> None:
        for operation in self.operations:
            self.device.perform(*operation)

    def release(self) -> None:
        self.pool.graphs -= 1
        if self.pool.graphs == 0:
            for storage in self.pool.storages:
                self.device.free(storage)
            self.pool.storages.clear()


class FakeDevice:
    name = "fake:0"
    identity = "fake"
    captures = True
    lazy = False

    def __init__(self, size: int = 1 << 17) -> None:
        self.size = size
        self.content = bytearray(size)
        self.allocated: dict[int, int] = {}
        self.peak = 0
        self.recording: list[tuple] | None = None

    # ------------------------------------------------------------ memory

    def memory(self) -> Memory:
        held = sum(self.allocated.values())
        return Memory(self.size - held, held, self.peak)

    def forget_peak(self) -> None:
        self.peak = self.memory().held

    def trim(self) -> None:
        pass

    def synchronise(self) -> None:
        pass

    def allocate(self, nbytes: int) -> FakeStorage:
        whole = -(-nbytes // ALIGNMENT) * ALIGNMENT
        address = BASE
        for start, length in sorted(self.allocated.items()):
            if address + whole <= start:
                break
            address = start + length
        if address + whole > BASE + self.size:
            raise MemoryError(f"{nbytes} bytes do not fit")
        self.allocated[address] = whole
        self.peak = max(self.peak, self.memory().held)
        return FakeStorage(self, address, nbytes)

    def free(self, storage: FakeStorage) -> None:
        del self.allocated[storage.address]

    def check(self, view: FakeView) -> None:
        end = view.address + view.nbytes
        if not any(start <= view.address and end <= start + n for start, n in self.allocated.items()):
            raise IllegalAccess(f"{view.address:#x}")

    # ------------------------------------------------------------ work

    def execute(self, kind: str, out: FakeView, source: FakeView | None, number: int) -> None:
        """Do it now, or record it."""
        if self.recording is not None:
            self.recording.append((kind, out, source, number))
        else:
            self.perform(kind, out, source, number)

    def perform(self, kind: str, out: FakeView, source: FakeView | None, number: int) -> None:
        self.check(out)
        if source is not None:
            number = (self.read(source)[0] + number) % 256
        first = out.address - BASE
        self.content[first : first + out.nbytes] = bytes([number]) * out.nbytes

    def read(self, view: FakeView) -> bytes:
        self.check(view)
        first = view.address - BASE
        return bytes(self.content[first : first + view.nbytes])

    # ------------------------------------------------------------ graphs

    def new_pool(self) -> Pool:
        return Pool()

    def capture(self, body: Callable[[], object], pool: Pool) -> FakeGraph:
        self.recording = []
        try:
            body()
            operations = self.recording
        finally:
            self.recording = None
        largest = max((view.nbytes for _, view, _, _ in operations), default=1)
        if not any(storage.nbytes >= largest for storage in pool.storages):
            pool.storages.append(self.allocate(largest))
        return FakeGraph(self, pool, operations)
