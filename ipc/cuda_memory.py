"""Arena memory of GPUs: one allocation of its own, which another process opens by the driver's handle.

The memory never comes from a tensor library's allocator: that one shares what it hands out with others, and
cannot be exported where it uses expandable segments or cudaMallocAsync.
"""

from __future__ import annotations

import ctypes
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from ipc import cuda
from ipc.cuda import ELSEWHERE, CudaError
from ipc.errors import ArenaError, CudaIpcUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ipc.cuda import CudaRuntime
    from ipc.errors import CudaIpcObstacle
    from ipc.messages import ArenaExport


class _DeviceMemory:
    """At one address of this process, however it came there."""

    pointer: int

    def __init__(self, device_id: str) -> None:
        """Raises CudaIpcUnavailable if memory of this device cannot be shared."""
        cuda.check_possible(device_id)
        self._runtime = cuda.runtime()
        self._ordinal = cuda.ordinal_of(device_id)
        self._held = _Held()

    def span(self, offset: int, nbytes: int) -> DeviceSpan:
        return DeviceSpan(self._runtime, self._ordinal, self._held, self.pointer + offset, nbytes)

    def synchronise(self) -> None:
        """Until the device has done what it was asked to."""
        with self._device():
            self._runtime.synchronise()

    def close(self) -> bool:
        """Whether it is let go of; it is not while spans of it are held, but may be tried again."""
        if self._held.count:
            return False
        with self._device():
            self._let_go()
        return True

    def _let_go(self) -> None:
        raise NotImplementedError

    def _device(self) -> Any:
        return _selected(self._runtime, self._ordinal)


class CudaMemory(_DeviceMemory):
    """The exporter's end: an allocation of its own."""

    def __init__(self, nbytes: int, device_id: str) -> None:
        """Raises CudaIpcUnavailable if it cannot be shared, ArenaError if there is not so much memory."""
        super().__init__(device_id)
        with self._device():
            try:
                self.pointer = self._runtime.allocate(nbytes)
            except CudaError as error:
                raise ArenaError(f"no {nbytes} bytes on GPU {device_id}: {error}") from error
            try:
                self.handle = self._runtime.export(self.pointer)
            except CudaError as error:
                self._let_go()
                _refuse_export(error)

    def write(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        source = bytes(data)
        address = ctypes.cast(ctypes.c_char_p(source), ctypes.c_void_p).value
        assert address is not None, "bytes have an address"
        with self._device():
            self._runtime.copy(self.pointer + offset, address, len(source))

    def _let_go(self) -> None:
        self._runtime.free(self.pointer)


class MappedCuda(_DeviceMemory):
    """An importer's end: the whole allocation of another process, at an address of this one."""

    def __init__(self, export: ArenaExport) -> None:
        """Raises CudaIpcUnavailable, and names why."""
        cuda.check_same_namespace(export)
        super().__init__(export.device_id)
        with self._device():
            try:
                self.pointer = self._runtime.open(export.handle)
            except CudaError as error:
                _refuse_import(error, export)

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy on the host."""
        buffer = ctypes.create_string_buffer(nbytes)
        with self._device():
            self._runtime.copy(ctypes.addressof(buffer), self.pointer + offset, nbytes)
        return buffer.raw

    def _let_go(self) -> None:
        self._runtime.unmap(self.pointer)


class _Held:
    """How many spans there are: memory that is unmapped under one would be read all the same."""

    def __init__(self) -> None:
        self.count = 0

    def less(self) -> None:
        self.count -= 1


class DeviceSpan:
    """Bytes on a device, shown to a tensor library as a one-dimensional array of uint8. Counts as held until
    it, and every tensor that was made of it, is gone."""

    def __init__(self, runtime: CudaRuntime, ordinal: int, held: _Held, pointer: int, nbytes: int) -> None:
        self.ordinal = ordinal
        self.pointer = pointer
        self.nbytes = nbytes
        held.count += 1
        weakref.finalize(self, held.less).atexit = False
        about = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}
        setattr(self, runtime.array_interface, about)


@contextmanager
def _selected(runtime: CudaRuntime, ordinal: int) -> Iterator[None]:
    before = runtime.select(ordinal)
    try:
        yield
    finally:
        runtime.select(before)


def _refuse_export(error: CudaError) -> NoReturn:
    if error.code in (cuda.INVALID_VALUE, cuda.NOT_SUPPORTED):
        raise CudaIpcUnavailable(
            "not_exportable",
            f"the driver exports no memory of this process ({error}): something replaces cudaMalloc, such as "
            f"expandable segments or cudaMallocAsync of a preloaded allocator; {ELSEWHERE}",
        ) from error
    raise CudaIpcUnavailable("driver", f"the driver exports nothing: {error}; {ELSEWHERE}") from error


def _refuse_import(error: CudaError, export: ArenaExport) -> NoReturn:
    obstacles: dict[int, tuple[CudaIpcObstacle, str]] = {
        cuda.INVALID_CONTEXT: ("same_process", "as within one process; do both lanes have the same pid?"),
        cuda.INVALID_HANDLE: ("driver", "as if its exporter were gone"),
        cuda.PEER_ACCESS_UNSUPPORTED: ("driver", "the GPUs of the lanes have no way to each other"),
    }
    obstacle, why = obstacles.get(error.code, ("driver", "the driver does not say why"))
    raise CudaIpcUnavailable(
        obstacle, f"arena {export.arena} cannot be opened ({error}): {why}; {ELSEWHERE}"
    ) from error
