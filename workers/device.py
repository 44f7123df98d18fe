"""What a lane asks of the device it runs on, in a handful of calls. Knows no model and no workspace."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import NamedTuple, Protocol

import psutil

_PROC = Path("/proc/self")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


class Memory(NamedTuple):
    """Bytes: free on the device, held by this process, and the most it held since `forget_peak`."""

    free: int
    held: int
    peak: int


class Device(Protocol):
    """`name` is what this process calls it, `identity` is the same in all processes."""

    name: str
    identity: str

    def memory(self) -> Memory: ...

    def forget_peak(self) -> None:
        """The peak is what is held now."""
        ...

    def synchronise(self) -> None:
        """Return when all that was asked of the device is done."""
        ...


class Cpu:
    """Memory is resident memory; it needs no tensor library."""

    name = "cpu"
    identity = "cpu"

    def memory(self) -> Memory:
        held = int(psutil.Process().memory_info().rss)
        free = psutil.virtual_memory().available
        with contextlib.suppress(OSError, ValueError):  # no limit, or no such control group
            free = min(free, int(_CGROUP_LIMIT.read_text()) - int(_CGROUP_USED.read_text()))
        return Memory(max(0, free), held, max(held, _high_water()))

    def forget_peak(self) -> None:
        with contextlib.suppress(OSError):  # where that is forbidden, an old peak stays: never too little
            (_PROC / "clear_refs").write_text("5")

    def synchronise(self) -> None:
        """Nothing runs behind our back."""


class Cuda:
    """A GPU of this process, through torch. Held is what torch's allocator reserved there."""

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
        self._cuda = torch.cuda

    def memory(self) -> Memory:
        free, _ = self._cuda.mem_get_info(self._index)
        held = self._cuda.memory_reserved(self._index)
        return Memory(free, held, self._cuda.max_memory_reserved(self._index))

    def forget_peak(self) -> None:
        self._cuda.reset_peak_memory_stats(self._index)

    def synchronise(self) -> None:
        self._cuda.synchronize(self._index)


def open_device(name: str) -> Device:
    """The device of a name like cpu or cuda:1. Raises ValueError if it does not exist."""
    return Cpu() if name == "cpu" else Cuda(name)


def _high_water() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", (_PROC / "status").read_text())
    return int(found[1]) * 1024 if found else 0
