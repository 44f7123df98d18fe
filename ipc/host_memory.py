"""How much memory can still be had here: of the host, and of the control group if that has a limit."""

from __future__ import annotations

import contextlib
from pathlib import Path

_HOST = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
_UNKNOWN = 1 << 30
"""What is taken for available where the host does not tell."""


def available() -> int:
    """Bytes. Files that are cached count as available, as the kernel drops them first."""
    free = _UNKNOWN
    with contextlib.suppress(OSError, ValueError, LookupError):
        free = _fields(_HOST)["MemAvailable:"] * 1024
    with contextlib.suppress(OSError, ValueError, LookupError):  # no limit, or no such control group
        limit, used = (int((_GROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, limit - used + _fields(_GROUP / "memory.stat")["inactive_file"])
    return max(0, free)


def _fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number."""
    lines = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
