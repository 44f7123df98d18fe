"""What a lane asks of the device it runs on, in a handful of calls. Knows no model and no workspace.

All of a lane's storage and all of its graphs pass here, so that a fake device can stand in for a GPU and show
what happens to addresses (tests/unit/fake_device.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import psutil

from ipc import host_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from workers.workspace import Spec

_PROC = Path("/proc/self")

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)


class Memory(NamedTuple):
    """Bytes: free on the device, held by this process, and the most it held since `forget_peak`."""

    free: int
    held: int
    peak: int


class Storage(Protocol[V_co]):
    """A piece of device memory at a fixed address."""

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def view(self, offset: int, spec: Spec) -> V_co:
        """A view of the bytes from `offset` on."""
        ...

    def fill(self, byte: int) -> None: ...


class Allocator(Protocol[V]):
    """The part of a device that a workspace needs."""

    def allocate(self, nbytes: int) -> Storage[V]:
        """Raises MemoryError or the device's own error if there is no room."""
        ...

    def free(self, storage: Storage[V]) -> None:
        """Give it back to the device; its address may be anybody's then."""
        ...


class Graph(Protocol):
    """Work that was captured with the addresses it used."""

    def replay(self) -> None: ...

    def release(self) -> None:
        """Let go of the graph, and of its pool once no other graph uses it."""
        ...


class Device(Allocator[V], Protocol[V]):
    """`name` is what this process calls it, `identity` is the same in all processes."""

    name: str
    identity: str
    captures: bool
    """Whether it has graphs."""
    lazy: bool
    """Whether memory counts only once it has been written to."""

    def memory(self) -> Memory: ...

    def forget_peak(self) -> None:
        """The peak is what is held now."""
        ...

    def trim(self) -> None:
        """Give back what was freed, but is kept for later."""
        ...

    def synchronise(self) -> None:
        """Return when all that was asked of the device is done."""
        ...

    def new_pool(self) -> object:
        """Memory for what graphs allocate, shared by those captured into it and by nobody else."""
        ...

    def capture(self, body: Callable[[], object], pool: object) -> Graph:
        """Record what `body` does, without doing it."""
        ...


class TensorStorage:
    """Bytes of torch's, aligned for all views."""

    def __init__(self, nbytes: int, device: str, alignment: int = 256) -> None:
        import torch

        with torch.inference_mode(False):  # so that it may be written to in either mode
            whole = torch.empty(nbytes + alignment, dtype=torch.uint8, device=device)
        first = -whole.data_ptr() % alignment
        self._bytes = whole[first : first + nbytes]
        self.address = self._bytes.data_ptr()
        self.nbytes = nbytes

    def view(self, offset: int, spec: Spec) -> Tensor:
        view: Tensor = self._bytes[offset : offset + spec.nbytes].view(spec.dtype).view(spec.shape)  # type: ignore[call-overload]
        return view

    def fill(self, byte: int) -> None:
        self._bytes.fill_(byte)


class Cpu:
    """Memory is resident memory; only its storage needs a tensor library."""

    name = "cpu"
    identity = "cpu"
    captures = False
    lazy = True

    def memory(self) -> Memory:
        held = int(psutil.Process().memory_info().rss)
        return Memory(host_memory.available(), held, max(held, _high_water()))

    def forget_peak(self) -> None:
        with contextlib.suppress(OSError):  # where that is forbidden, an old peak stays: never too little
            (_PROC / "clear_refs").write_text("5")

    def trim(self) -> None:
        gc.collect()
        with contextlib.suppress(AttributeError):  # another C library than GNU's
            ctypes.CDLL(None).malloc_trim(0)

    def synchronise(self) -> None:
        """Nothing runs behind our back."""

    def allocate(self, nbytes: int) -> Storage[Tensor]:
        return TensorStorage(nbytes, self.name)

    def free(self, storage: Storage[Tensor]) -> None:
        """It goes with its last view."""

    def new_pool(self) -> object:
        raise NotImplementedError("a CPU has no graphs")

    def capture(self, body: Callable[[], object], pool: object) -> Graph:
        raise NotImplementedError("a CPU has no graphs")


class Cuda:
    """A GPU of this process, through torch. Held is what torch's allocator reserved there."""

    captures = True
    lazy = False

    def __init__(self, name: str) -> None:
        """`cuda` is the first. Raises ValueError if there is no such GPU."""
        import torch

        count = torch.cuda.device_count()
        self._index = int(name.partition(":")[2] or 0)
        if self._index >= count:
            works = f"cuda:{count - 1}" if count else "cpu"
            raise ValueError(f"device {name} does not exist, there are {count} GPUs; try {works}")
        self.name = f"cuda:{self._index}"
        self.identity = str(torch.cuda.get_device_properties(self._index).uuid)
        self._torch = torch

    def memory(self) -> Memory:
        cuda = self._torch.cuda
        free, _ = cuda.mem_get_info(self._index)
        return Memory(free, cuda.memory_reserved(self._index), cuda.max_memory_reserved(self._index))

    def forget_peak(self) -> None:
        self._torch.cuda.reset_peak_memory_stats(self._index)

    def trim(self) -> None:
        gc.collect()
        self._torch.cuda.empty_cache()

    def synchronise(self) -> None:
        self._torch.cuda.synchronize(self._index)

    def allocate(self, nbytes: int) -> Storage[Tensor]:
        return TensorStorage(nbytes, self.name)

    def free(self, storage: Storage[Tensor]) -> None:
        """It goes back to torch's allocator with its last view."""

    def new_pool(self) -> object:
        return self._torch.cuda.graph_pool_handle()

    def capture(self, body: Callable[[], object], pool: object) -> Graph:
        graph = self._torch.cuda.CUDAGraph()
        # Errors of other threads' calls are none of ours.
        with self._torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # type: ignore[arg-type]
            body()
        return CudaGraph(graph)


class CudaGraph:
    def __init__(self, graph: Any) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def release(self) -> None:
        self._graph.reset()


def open_device(name: str) -> Cpu | Cuda:
    """The device of a name like cpu or cuda:1. Raises ValueError if it does not exist."""
    return Cpu() if name == "cpu" else Cuda(name)


def _high_water() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", (_PROC / "status").read_text())
    return int(found[1]) * 1024 if found else 0
