"""A CUDA runtime without a GPU, for real processes: device memory is shared memory, handles are found by pid.

It keeps the rules that arenas must obey: no handle opens in the process that made it, an ordinal means
nothing elsewhere, a mapping outlives its exporter until it is closed, and a closed one is gone at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct

from ipc import cuda
from ipc.cuda import CudaError

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_HANDLE = struct.Struct("<4siiQ")
_MAGIC = b"fake"
NAME = "fake-device-memory"
"""How device memory is called in /proc/PID/maps."""


class FakeCuda:
    """`fails`: by call, the code that it fails with. `ids`: the devices that there are; `cpu` lets lanes
    whose arithmetic runs on a CPU have their arenas here."""

    array_interface = "__array_interface__"

    def __init__(
        self,
        ids: tuple[str, ...] = ("cpu",),
        name: str = "Fake GPU",
        capacity: int = 1 << 32,
        fails: dict[str, int] | None = None,
    ) -> None:
        self.ids = ids
        self.name = name
        self.fails = fails or {}
        self.current = 0
        self.synchronised = 0
        self._left = capacity
        self._owned: dict[int, tuple[int, int]] = {}
        self._mapped: dict[int, int] = {}

    @property
    def allocations(self) -> int:
        return len(self._owned)

    @property
    def mappings(self) -> int:
        return len(self._mapped)

    def device_ids(self) -> list[str]:
        self._maybe_fail("device_ids")
        return list(self.ids)

    def device_name(self, ordinal: int) -> str:
        assert 0 <= ordinal < len(self.ids)
        return self.name

    def select(self, ordinal: int) -> int:
        assert 0 <= ordinal < len(self.ids)
        before, self.current = self.current, ordinal
        return before

    def allocate(self, nbytes: int) -> int:
        self._maybe_fail("allocate")
        if nbytes > self._left:
            raise CudaError(cuda.MEMORY_ALLOCATION, "cudaMalloc: out of memory")
        fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        os.posix_fallocate(fd, 0, nbytes)
        pointer = _map(fd, nbytes)
        self._owned[pointer] = (fd, nbytes)
        self._left -= nbytes
        return pointer

    def free(self, pointer: int) -> None:
        fd, nbytes = self._owned.pop(pointer)
        _libc.munmap(pointer, nbytes)
        os.close(fd)
        self._left += nbytes

    def export(self, pointer: int) -> bytes:
        self._maybe_fail("export")
        fd, nbytes = self._owned[pointer]
        return _HANDLE.pack(_MAGIC, os.getpid(), fd, nbytes).ljust(cuda.HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        self._maybe_fail("open")
        magic, pid, number, nbytes = _HANDLE.unpack_from(handle)
        if magic != _MAGIC:
            raise CudaError(cuda.INVALID_HANDLE, "cudaIpcOpenMemHandle: invalid handle")
        if pid == os.getpid():
            raise CudaError(cuda.INVALID_CONTEXT, "cudaIpcOpenMemHandle: invalid context")
        try:
            fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CudaError(cuda.INVALID_HANDLE, f"cudaIpcOpenMemHandle: {error.strerror}") from error
        try:
            pointer = _map(fd, nbytes)
        finally:
            os.close(fd)
        self._mapped[pointer] = nbytes
        return pointer

    def unmap(self, pointer: int) -> None:
        _libc.munmap(pointer, self._mapped.pop(pointer))

    def copy(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def synchronise(self) -> None:
        self.synchronised += 1

    def _maybe_fail(self, call: str) -> None:
        if call in self.fails:
            raise CudaError(self.fails[call], f"{call} was made to fail")


def _map(fd: int, nbytes: int) -> int:
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value), ctypes.get_errno()
    return int(address)
