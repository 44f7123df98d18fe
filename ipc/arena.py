"""Tensor memory that one lane exports and another reads: the same protocol over memfd and CUDA IPC.

    exporter:  slot = arena.reserve(nbytes)          importer:  importer.open(arena.export, fd)
               … write into arena.span(slot) …                  span = importer.view(descriptor)
               descriptor = arena.publish(slot, dtype, shape)   … read, drop the span …
               arena.apply(ref, SlotEvent.RELEASED)             ref = importer.ack(descriptor)

Ordering is gated by the host: `publish` waits for the exporter's device before there is a descriptor, `ack`
for the importer's before there is an answer. The messages that carry them are the barrier, so nothing here
polls, and both transports obey one protocol. Whoever carries the messages decides what becomes of slots.
"""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ipc import cuda
from ipc.cuda_memory import CudaMemory, MappedCuda
from ipc.descriptor import check, tensor_bytes
from ipc.errors import ArenaError, BadDescriptor, ProtocolError
from ipc.extents import Extents
from ipc.memfd import MappedMemfd, MemfdMemory
from ipc.messages import ArenaExport, Descriptor, SlotRef
from ipc.slots import SlotEvent, Slots, SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ipc.cuda_memory import DeviceSpan
    from ipc.messages import SharedTransport, TensorDtype

SLOTS = 4096
"""Of an arena, unless its bytes run out before."""
PROBE_BYTES = 4096
"""Behind the slots of every arena: a pattern that an importer proves its way to the memory by."""


class Memory(Protocol):
    """What an exporter's arena lies in."""

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None: ...
    def span(self, offset: int, nbytes: int) -> memoryview | DeviceSpan: ...
    def synchronise(self) -> None: ...
    def close(self) -> bool: ...


class Mapping(Protocol):
    """The same memory, as an importer sees it."""

    def span(self, offset: int, nbytes: int) -> memoryview | DeviceSpan: ...
    def read(self, offset: int, nbytes: int) -> bytes: ...
    def synchronise(self) -> None: ...
    def close(self) -> bool: ...


class Slot(NamedTuple):
    """Bytes of an arena that are the exporter's to write."""

    number: int
    generation: int
    offset: int
    nbytes: int


class Arena:
    """The exporter's end. One thread only. Holds `slots` tensors at most, of any sizes that fit together."""

    def __init__(
        self,
        arena: str,
        epoch: str,
        nbytes: int,
        transport: SharedTransport,
        device_id: str = "cpu",
        slots: int = SLOTS,
    ) -> None:
        """`arena`: a name that is never used again. `nbytes`: for tensors. `device_id`: where, for cuda_ipc.

        Raises ArenaError if there is not so much memory, CudaIpcUnavailable if it could not be shared.
        """
        handle, self.fd = b"", -1
        self._memory: Memory
        if transport == "cuda_ipc":
            self._memory = memory = CudaMemory(nbytes + PROBE_BYTES, device_id)
            handle = memory.handle
        else:
            device_id = "cpu"
            self._memory = self._memfd = MemfdMemory(nbytes + PROBE_BYTES)
            self.fd = self._memfd.fd
        self.export = ArenaExport(
            *(arena, epoch, transport, nbytes, slots, device_id, handle),
            *(os.getpid(), cuda.pid_namespace()),
        )
        self._slots = Slots(slots)
        self._extents = Extents(nbytes)
        self._places: dict[int, tuple[int, int]] = {}
        self.stale = 0
        """Events about past generations, which were dropped."""
        self._memory.write(nbytes, pattern(self.export))
        self._memory.synchronise()

    @property
    def free_slots(self) -> int:
        return self._slots.free

    @property
    def free_bytes(self) -> int:
        return self._extents.free

    def count(self, state: SlotState) -> int:
        """How many slots are in a state."""
        return self._slots.count(state)

    def reserve(self, nbytes: int) -> Slot | None:
        """A slot to write, or None if there is no room: then the tensor has to go another way, or wait."""
        offset = self._extents.take(nbytes)
        if offset is None:
            return None
        acquired = self._slots.acquire()
        if acquired is None:
            self._extents.give(offset)
            return None
        slot = Slot(*acquired, offset, nbytes)
        self._places[slot.number] = (offset, slot.generation)
        return slot

    def span(self, slot: Slot) -> memoryview | DeviceSpan:
        """The slot's bytes, to be written in place. Not to be kept beyond `publish`."""
        return self._memory.span(slot.offset, slot.nbytes)

    def publish(self, slot: Slot, dtype: TensorDtype, shape: Sequence[int]) -> Descriptor:
        """What was written is a dense tensor, and the importer's from now on.

        Raises BadDescriptor if the tensor is larger than the slot.
        """
        nbytes = tensor_bytes(dtype, shape)
        if not 0 < nbytes <= slot.nbytes:
            raise BadDescriptor(f"{dtype} of shape {list(shape)} in a slot of {slot.nbytes} bytes")
        self._memory.synchronise()
        self._slots.apply(slot.number, slot.generation, SlotEvent.PUBLISHED)
        arena, epoch = self.export.arena, self.export.epoch
        return Descriptor(
            arena, epoch, slot.number, slot.generation, slot.offset, nbytes, dtype, tuple(shape)
        )

    def put(self, data: bytes | memoryview, dtype: TensorDtype, shape: Sequence[int]) -> Descriptor | None:
        """Copy bytes of the host in and publish them; None if there is no room."""
        slot = self.reserve(tensor_bytes(dtype, shape))
        if slot is None:
            return None
        self._memory.write(slot.offset, data)
        return self.publish(slot, dtype, shape)

    def abandon(self, slot: Slot) -> None:
        """Nothing will be published of it."""
        self._apply(slot.number, slot.generation, SlotEvent.ABANDONED)

    def apply(self, ref: SlotRef, event: SlotEvent) -> None:
        """What was said of a published slot. One of another arena or generation is stale: dropped, counted.

        Raises ProtocolError for an event that is not legal now.
        """
        if ref.arena != self.export.arena or self._generation(ref.slot) != ref.generation:
            self.stale += 1
            return
        self._apply(ref.slot, ref.generation, event)

    def release(self, refs: Iterable[SlotRef]) -> None:
        """Nobody reads these any more."""
        for ref in refs:
            self.apply(ref, SlotEvent.RELEASED)

    def peer_died(self) -> int:
        """The importer's death is confirmed: all that it held is free. How many that were."""
        freed = self._slots.peer_died()
        for index in freed:
            self._give_back(index)
        return len(freed)

    def close(self) -> bool:
        """Whether the memory is given back; it is not while spans of it are held, but may be tried again."""
        self.fd = -1
        return self._memory.close()

    def forget_fd(self) -> None:
        """The descriptor was passed on."""
        if self.fd >= 0:
            self._memfd.forget_fd()
            self.fd = -1

    def _generation(self, index: int) -> int | None:
        place = self._places.get(index)
        return place[1] if place is not None else None

    def _apply(self, index: int, generation: int, event: SlotEvent) -> None:
        self._slots.apply(index, generation, event)
        if self._slots.state(index) is SlotState.FREE:
            self._give_back(index)

    def _give_back(self, index: int) -> None:
        offset, _ = self._places.pop(index)
        self._extents.give(offset)


class Importer:
    """The other lanes' arenas, as far as this one has opened them. One thread only."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[ArenaExport, Mapping]] = {}
        self._newest: dict[tuple[str, int], int] = {}
        self._read: set[SlotRef] = set()
        self._closing: list[Mapping] = []

    def open(self, export: ArenaExport, fd: int | None = None) -> None:
        """Map an arena. `fd`: of a memfd; it is taken over. Raises ArenaError or CudaIpcUnavailable."""
        if export.arena in self._open:
            raise ProtocolError(f"arena {export.arena} is open already")
        mapping: Mapping
        if export.transport == "cuda_ipc":
            mapping = MappedCuda(export)
        elif fd is not None:
            mapping = MappedMemfd(fd, export.nbytes + PROBE_BYTES)
        else:
            raise ArenaError(f"arena {export.arena} is a memfd, but no descriptor came with it")
        self._open[export.arena] = (export, mapping)

    def knows(self, arena: str) -> bool:
        return arena in self._open

    def prove(self, arena: str) -> None:
        """Read an arena's pattern, by the way that tensors will come. Raises ArenaError if it is another."""
        export, mapping = self._open[arena]
        if mapping.read(export.nbytes, PROBE_BYTES) != pattern(export):
            raise ArenaError(f"arena {export.arena}: what its exporter wrote is not what is read here")

    def view(self, descriptor: Descriptor) -> memoryview | DeviceSpan:
        """The tensor's bytes, where they are. Raises BadDescriptor before anything is made of them.

        Whoever holds the span, or a tensor over it, keeps the mapping; drop all before `ack`.
        """
        _, mapping = self._checked(descriptor)
        self._newest[descriptor.arena, descriptor.slot] = descriptor.generation
        self._read.add(descriptor.ref)
        return mapping.span(descriptor.offset, descriptor.nbytes)

    def ack(self, *descriptors: Descriptor) -> list[SlotRef]:
        """Wait until what was viewed has been read, and say so; nothing of what is not open any more."""
        refs = [d.ref for d in descriptors if d.ref in self._read]
        for arena in dict.fromkeys(ref.arena for ref in refs):
            if arena in self._open:
                self._open[arena][1].synchronise()
        self._read.difference_update(refs)
        return refs

    def close(self, arena: str) -> None:
        """Unmap an arena at once, or as soon as the last span of it is dropped. Nothing if it is not open."""
        found = self._open.pop(arena, None)
        if found is not None:
            self._closing.append(found[1])
        self._newest = {key: newest for key, newest in self._newest.items() if key[0] != arena}
        self._read = {ref for ref in self._read if ref.arena != arena}
        self.tidy()

    def tidy(self) -> int:
        """Unmap what could not be unmapped before; how many mappings wait still."""
        self._closing = [mapping for mapping in self._closing if not mapping.close()]
        return len(self._closing)

    def close_all(self) -> None:
        for arena in list(self._open):
            self.close(arena)

    def _checked(self, descriptor: Descriptor) -> tuple[ArenaExport, Mapping]:
        found = self._open.get(descriptor.arena)
        if found is None:
            raise BadDescriptor(f"arena {descriptor.arena} is not open here")
        check(descriptor, found[0], self._newest.get((descriptor.arena, descriptor.slot), 0))
        return found


def pattern(export: ArenaExport) -> bytes:
    """What a probe of this arena must read: PROBE_BYTES that no other arena, and no empty memory, has."""
    digest = hashlib.sha256(f"{export.arena}/{export.epoch}".encode()).digest()
    return digest * (PROBE_BYTES // len(digest))
