"""A lane's part in shared tensor memory: the arenas that it exports, those of others that it has opened.

Obeys the orders about arenas, puts tensors into its own, and shows those that it is handed. What becomes of a
slot is not decided here. Without a lifeline there is no memfd. Imports a tensor library only for tensors.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ipc import cuda
from ipc.arena import Arena, Importer
from ipc.errors import ArenaError, CudaIpcUnavailable
from ipc.messages import Export, Exported, HiddenRows, Import, Imported, QRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from ipc.lifeline import WorkerEnd
    from ipc.messages import Descriptor, SlotRef, Unmap


log = logging.getLogger("speclane")


class TensorPlane:
    """One thread only, the session's."""

    def __init__(self, epoch: str = "", lifeline: WorkerEnd | None = None) -> None:
        self._epoch = epoch
        self._lifeline = lifeline
        self._device_id = "cpu"
        self._arenas: dict[str, Arena] = {}
        self._closing: list[Arena] = []
        self._importer = Importer()
        self._handed: list[Descriptor] = []

    # ------------------------------------------------------------ orders

    def settle_on(self, device_id: str) -> str:
        """The lane runs on this device. Why its memory cannot be shared by CUDA IPC; empty if it can."""
        self._device_id = device_id
        try:
            cuda.check_possible(device_id)
        except CudaIpcUnavailable as error:
            return str(error)
        return ""

    def obey(self, order: Export | Import | Unmap) -> Exported | Imported | None:
        """What cannot be done is said in the answer: there are other ways for tensors to go."""
        if isinstance(order, Import):
            return self._import(order)
        if isinstance(order, Export):
            return self._export(order)
        self._unmap(order.arenas)
        return None

    def _export(self, order: Export) -> Exported:
        try:
            arena = Arena(order.arena, self._epoch, order.nbytes, order.transport, self._device_id)
        except ArenaError as error:
            return Exported(self._epoch, order.arena, None, str(error))
        self._arenas[order.arena] = arena
        if arena.fd >= 0:
            sent = self._lifeline is not None and self._lifeline.give(order.arena, arena.fd)
            arena.forget_fd()
            if not sent:
                self._unmap([order.arena])
                return Exported(self._epoch, order.arena, None, "its file cannot be sent to the coordinator")
        return Exported(self._epoch, order.arena, arena.export)

    def _import(self, order: Import) -> Imported:
        name = order.export.arena
        fd = None
        if order.export.transport == "memfd" and self._lifeline is not None:
            fd = self._lifeline.take(name)
        try:
            self._importer.open(order.export, fd)
            self._importer.prove(name)
        except ArenaError as error:
            self._importer.close(name)
            return Imported(self._epoch, name, str(error))
        return Imported(self._epoch, name)

    def _unmap(self, names: Iterable[str]) -> None:
        for name in names:
            self._importer.close(name)
            if (arena := self._arenas.pop(name, None)) is not None:
                self._closing.append(arena)
        self._tidy()

    def _tidy(self) -> None:
        """What could not be closed before, since a tensor over it was still there."""
        self._importer.tidy()
        self._closing = [arena for arena in self._closing if not arena.close()]

    # ------------------------------------------------------------ this lane's own

    def release(self, refs: Iterable[SlotRef]) -> None:
        """Nobody reads these any more."""
        for ref in refs:
            if (arena := self._arenas.get(ref.arena)) is not None:
                arena.release([ref])

    def put(self, tensor: Tensor, arena: str) -> Descriptor | None:
        """A copy of a tensor in an arena of this lane, for others; None if that is full, or not there."""
        from workers.tensors import NAMES, tensor_over

        held = self._arenas.get(arena)
        slot = held.reserve(tensor.nbytes) if held is not None else None
        if held is None or slot is None:
            return None
        name, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        tensor_over(held.span(slot), name, shape).copy_(tensor)
        return held.publish(slot, name, shape)

    def pack_rows(self, start: int, rows: Tensor, arena: str) -> HiddenRows:
        """Rows [n, features] in bfloat16 of positions from `start` on, by arena if there is room."""
        import torch

        at = self.put(rows, arena)
        data = b"" if at is not None else rows.cpu().view(torch.int16).numpy().tobytes()
        return HiddenRows(start, len(rows), data, at)

    def put_q(self, row: QRow, arena: str) -> QRow | None:
        """A full q row by arena; None if there is no room."""
        import torch

        at = self.put(torch.frombuffer(bytearray(row.weights), dtype=torch.float32), arena)
        return QRow(b"", b"", at) if at is not None else None

    # ------------------------------------------------------------ others'

    def view(self, descriptor: Descriptor) -> Tensor:
        """The tensor itself, to be read until `acks`. Raises BadDescriptor."""
        from workers.tensors import tensor_over

        self._handed.append(descriptor)
        return tensor_over(self._importer.view(descriptor), descriptor.dtype, descriptor.shape)

    def rows(self, part: HiddenRows) -> Tensor | None:
        """Rows [n, features] in bfloat16; None if they are out of reach, which costs drafts but no text."""
        import torch

        if part.at is not None:
            try:
                rows = self.view(part.at)
                return rows if rows.dtype is torch.bfloat16 and len(rows) == part.count else None
            except ArenaError as error:
                log.warning("hidden rows from %s on are not read: %s", part.start, error)
                return None
        return torch.frombuffer(bytearray(part.data), dtype=torch.bfloat16).view(part.count, -1)

    def q(self, row: QRow) -> QRow | None:
        """A q row with its weights; None if they are out of reach, which costs acceptance."""
        if row.at is None:
            return row
        try:
            return QRow(b"", self.view(row.at).cpu().numpy().tobytes())
        except ArenaError as error:
            log.warning("a q row is not read: %s", error)
            return None

    def acks(self) -> list[SlotRef]:
        """All that was handed since the last time, once the device has read it. No view of it may be held."""
        self._tidy()
        handed, self._handed = self._handed, []
        if handed:
            self._importer.ack(*handed)
        return [descriptor.ref for descriptor in handed]

    def close(self) -> None:
        self._importer.close_all()
        self._unmap(list(self._arenas))
