"""How soon after a lane was killed the other one has let go of its memory, and its process has ended."""

from __future__ import annotations

import os
import select
import threading
import time
from pathlib import Path
from typing import NamedTuple

from ipc import memfd

_SECONDS = 10.0
_POLL_SECONDS = 0.0005


class Released(NamedTuple):
    """Seconds after the kill. `unmapped`: None if nothing was, since the lanes share no memory."""

    unmapped: float | None
    ended: float


class LettingGo:
    """Looks on in a thread, from before the kill. Sees arenas of host memory only."""

    def __init__(self, victim: int, survivor: int) -> None:
        """The process ids of both. Raises OSError if one is gone already."""
        self._pidfd = os.pidfd_open(victim)
        self._survivor = survivor
        self._before = mapped(survivor)
        self._unmapped: float | None = None
        self._ended: float | None = None
        self._thread = threading.Thread(target=self._look, name="speclane-letting-go", daemon=True)
        self._thread.start()

    def since(self, began: float) -> Released:
        """Waits for both; `began`: time.perf_counter of the kill."""
        self._thread.join()
        os.close(self._pidfd)
        ended = self._ended if self._ended is not None else time.perf_counter()
        return Released(self._unmapped - began if self._unmapped is not None else None, ended - began)

    def _look(self) -> None:
        deadline = time.perf_counter() + _SECONDS
        while (now := time.perf_counter()) < deadline:
            if self._ended is None and select.select([self._pidfd], [], [], 0)[0]:
                self._ended = now
            if self._unmapped is None and mapped(self._survivor) < self._before:
                self._unmapped = time.perf_counter()
            if self._ended is not None and (self._unmapped is not None or self._before == 0):
                break
            time.sleep(_POLL_SECONDS)


def mapped(pid: int) -> int:
    """How many arenas a process has open, its own included; 0 if it is gone."""
    try:
        return Path(f"/proc/{pid}/maps").read_text().count(memfd.NAME)
    except OSError:
        return 0
