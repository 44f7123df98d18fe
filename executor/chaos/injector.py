"""Sends the signals. Knows which incarnations it has struck, so that no fault is spent on a dead process."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterable, Sequence

    from executor.chaos.plan import Fault, FaultKind
    from executor.lane import Lane
    from ipc.messages import LaneName


@dataclass(slots=True)
class Event:
    """A fault that struck: after so many tokens, `seconds` after the start; `back_seconds` later the lane's
    successor was seen to serve, None if it never was."""

    kind: FaultKind
    tokens: int
    seconds: float
    back_seconds: float | None = None


class Injector:
    """Thread-safe. An incarnation of a lane is struck once at most; what is due waits for the next."""

    def __init__(self, lanes: Callable[[], Sequence[Lane]]) -> None:
        self._lanes = lanes
        self._lock = threading.Lock()
        self._due: list[Fault] = []
        self._struck: dict[LaneName, tuple[str, Event]] = {}
        self._began = time.monotonic()
        self.tokens = 0
        self.events: list[Event] = []

    def add(self, faults: Iterable[Fault]) -> None:
        with self._lock:
            self._due += faults

    def committed(self, tokens: int) -> None:
        """So many more tokens have been committed: strike if that makes a fault due."""
        with self._lock:
            self.tokens += tokens
            if not (self._struck or self._due):
                return
            now = time.monotonic() - self._began
            lanes = {lane.name: lane for lane in self._lanes()}
            self._look(lanes, now)
            self._due = [f for f in self._due if f.at > self.tokens or not self._strike(f, lanes, now)]

    def look(self) -> None:
        """Note which lanes are back."""
        with self._lock:
            self._look({lane.name: lane for lane in self._lanes()}, time.monotonic() - self._began)

    @property
    def pending(self) -> int:
        """Faults that have not struck yet."""
        return len(self._due)

    @property
    def all_back(self) -> bool:
        """Whether every lane that was struck has been seen to serve again."""
        return not self._struck

    def counts(self, number: signal.Signals) -> Counter[LaneName]:
        """How often each lane was sent this signal."""
        return Counter(event.kind.lane for event in self.events if event.kind.signal == number)

    def _strike(self, fault: Fault, lanes: dict[LaneName, Lane], now: float) -> bool:
        lane = lanes.get(fault.kind.lane)
        if lane is None or lane.name in self._struck or not lane.serving:
            return False
        process = lane.process  # once: the coordinator's thread may set it to None at any time
        if process is None or not process.kill(fault.kind.signal):
            return False
        event = Event(fault.kind, self.tokens, now)
        self.events.append(event)
        self._struck[lane.name] = (lane.epoch, event)
        return True

    def _look(self, lanes: dict[LaneName, Lane], now: float) -> None:
        for name, (epoch, event) in list(self._struck.items()):
            lane = lanes.get(name)
            if lane is not None and lane.epoch != epoch and lane.serving:
                event.back_seconds = now - event.seconds
                del self._struck[name]
