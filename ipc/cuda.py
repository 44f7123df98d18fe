"""The handful of CUDA runtime calls that arenas rest on, and what can be told beforehand of their success.

A fake of CudaRuntime lets all the rest run in real processes where there is no GPU.
"""

from __future__ import annotations

import ctypes
import os
import uuid
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ipc.errors import ArenaError, CudaIpcUnavailable

if TYPE_CHECKING:
    from ipc.messages import ArenaExport

HANDLE_BYTES = 64
MEMORY_ALLOCATION = 2
PEER_ACCESS_UNSUPPORTED = 217
INVALID_CONTEXT = 201
INVALID_VALUE = 1
INVALID_HANDLE = 400
NOT_SUPPORTED = 801
_LAZY_PEER_ACCESS = 1
_COPY_ANY = 4
"""cudaMemcpyDefault: the driver tells from the addresses which way it goes."""
ELSEWHERE = "tensors go through host memory instead (--transport memfd)"


class CudaError(ArenaError):
    """A runtime call failed, with the runtime's own code and name."""

    def __init__(self, code: int, name: str) -> None:
        super().__init__(f"{name} ({code})")
        self.code = code


class CudaRuntime(Protocol):
    """The calls that arenas need. Pointers are addresses. All raise CudaError.

    `array_interface`: the attribute by which a tensor library is shown memory at such an address.
    """

    array_interface: str

    def device_ids(self) -> list[str]:
        """The UUIDs of the devices that this process sees, by ordinal."""
        ...

    def device_name(self, ordinal: int) -> str: ...

    def select(self, ordinal: int) -> int:
        """Make a device the current one of this thread; returns the one that was."""
        ...

    def allocate(self, nbytes: int) -> int: ...

    def free(self, pointer: int) -> None: ...

    def export(self, pointer: int) -> bytes:
        """The handle of an allocation, HANDLE_BYTES long."""
        ...

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation, mapped into this one."""
        ...

    def unmap(self, pointer: int) -> None:
        """What `open` mapped."""
        ...

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Between any two addresses; done when it returns."""
        ...

    def synchronise(self) -> None:
        """Return when all that this process asked of the current device is done."""
        ...


class BindingsRuntime:
    """The real one, by NVIDIA's cuda.bindings."""

    array_interface = "__cuda_array_interface__"

    def __init__(self) -> None:
        """Raises CudaIpcUnavailable if that package is not installed."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise CudaIpcUnavailable(
                "no_bindings", f"no cuda.bindings ({error}); run `pip install 'speclane[cuda]'`"
            ) from error
        self._runtime: Any = runtime

    def device_ids(self) -> list[str]:
        count = self._call("cudaGetDeviceCount")
        return [str(uuid.UUID(bytes=self._properties(i).uuid.bytes)) for i in range(count)]

    def device_name(self, ordinal: int) -> str:
        return str(bytes(self._properties(ordinal).name).rstrip(b"\0").decode(errors="replace"))

    def select(self, ordinal: int) -> int:
        before = int(self._call("cudaGetDevice"))
        if before != ordinal:
            self._call("cudaSetDevice", ordinal)
        return before

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cudaMalloc", nbytes))

    def free(self, pointer: int) -> None:
        self._call("cudaFree", pointer)

    def export(self, pointer: int) -> bytes:
        return ctypes.string_at(self._call("cudaIpcGetMemHandle", pointer).getPtr(), HANDLE_BYTES)

    def open(self, handle: bytes) -> int:
        opaque = self._runtime.cudaIpcMemHandle_t()
        ctypes.memmove(opaque.getPtr(), handle, HANDLE_BYTES)
        return int(self._call("cudaIpcOpenMemHandle", opaque, _LAZY_PEER_ACCESS))

    def unmap(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", pointer)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        self._call("cudaMemcpy", to, source, nbytes, self._runtime.cudaMemcpyKind(_COPY_ANY))

    def synchronise(self) -> None:
        self._call("cudaDeviceSynchronize")

    def _properties(self, ordinal: int) -> Any:
        return self._call("cudaGetDeviceProperties", ordinal)

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._runtime, name)(*args)
        if int(status):
            _, text = self._runtime.cudaGetErrorName(status)
            raise CudaError(int(status), f"{name}: {text.decode() if text else 'unknown error'}")
        return values[0] if values else None


_installed: CudaRuntime | None = None


def install(runtime: CudaRuntime | None) -> None:
    """Use this one from now on, in place of the real one; None is the real one."""
    global _installed
    _installed = runtime
    _real.cache_clear()


@cache
def _real() -> CudaRuntime:
    return BindingsRuntime()


def runtime() -> CudaRuntime:
    """Raises CudaIpcUnavailable if there is none."""
    return _installed if _installed is not None else _real()


def ordinal_of(device_id: str) -> int:
    """Which of this process's devices that is, by its UUID. Raises CudaIpcUnavailable.

    An ordinal of another process would say nothing: CUDA_VISIBLE_DEVICES may number devices otherwise here.
    """
    if device_id == "cpu" and _installed is None:  # and a lane on a CPU never wakes the driver
        raise CudaIpcUnavailable("no_device", "the lane runs on a CPU")
    try:
        visible = runtime().device_ids()
    except CudaError as error:
        raise CudaIpcUnavailable("driver", f"the driver says {error}") from error
    if device_id not in visible:
        raise CudaIpcUnavailable(
            "device_not_visible",
            f"GPU {device_id} is not visible to this lane; let both see both, as with --target-device cuda:0 "
            f"--speculator-device cuda:1, else {ELSEWHERE}",
        )
    return visible.index(device_id)


def check_possible(device_id: str) -> None:
    """Raises CudaIpcUnavailable if a lane on this device cannot share its memory, as far as can be told."""
    ordinal = ordinal_of(device_id)
    if "microsoft" in _kernel().lower():
        raise CudaIpcUnavailable("wsl2", f"WSL2 has no CUDA IPC; {ELSEWHERE}")
    try:
        name = runtime().device_name(ordinal)
    except CudaError as error:
        raise CudaIpcUnavailable("driver", f"the driver says {error}") from error
    if " MIG " in f" {name} ":
        raise CudaIpcUnavailable("mig", f"{name} is a MIG slice, which has no CUDA IPC; {ELSEWHERE}")


def pid_namespace() -> int:
    """Whose numbers processes have: those of one namespace mean nothing in another. 0 if that is not told."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def check_same_namespace(export: ArenaExport) -> None:
    """Raises CudaIpcUnavailable. The driver tells processes apart by their numbers alone."""
    if export.pid == os.getpid():
        raise CudaIpcUnavailable(
            "same_process",
            f"exporter and importer both have pid {export.pid}: CUDA opens no handle within one process, nor "
            f"across containers in which both have that pid; share the PID namespace, else {ELSEWHERE}",
        )
    ours = pid_namespace()
    if export.pid_namespace and ours and export.pid_namespace != ours:
        raise CudaIpcUnavailable(
            "pid_namespace",
            f"the lanes are in different PID namespaces; start their containers in one (--pid), else "
            f"{ELSEWHERE}",
        )


def _kernel() -> str:
    try:
        return Path("/proc/version").read_text()
    except OSError:
        return ""
