"""What lanes did when, for chrome://tracing or ui.perfetto.dev: a row per lane and one for the coordinator.

Times are of the coordinator's own clock: a lane's slice begins when its order was sent, later by what the way
took, and ends when its answer was read. Format: Trace Event Format, JSON object form.
"""

from __future__ import annotations

import json
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

EVENTS_KEPT = 1_000_000
"""The last so many; a long run's beginning is dropped."""
ROWS = {"coordinator": 0, "target": 1, "speculator": 2}


class Trace:
    """Written by one thread. Times in seconds of time.monotonic."""

    def __init__(self, file: Path | None, kept: int = EVENTS_KEPT) -> None:
        """`file`: where it is written; None keeps it in memory only. `kept`: the last so many events.

        Raises InvalidConfig if the file cannot be written.
        """
        self._file = file
        self._events: deque[dict[str, Any]] = deque(maxlen=kept)
        self._zero = time.monotonic()
        try:
            if file is not None:
                file.touch()
        except OSError as error:
            raise InvalidConfig("trace", f"--trace {file}: {error.strerror}; try trace.json") from None

    def work(self, lane: str, name: str, asked: float, answered: float, busy: float, **what: Any) -> None:
        """A lane obeyed an order: `busy` of the seconds from asking to answering it computed."""
        wire = max(0.0, answered - asked - busy) / 2
        self._slice(lane, name, asked + wire, min(busy, answered - asked), what)

    def own(self, name: str, began: float, ended: float, **what: Any) -> None:
        """The coordinator did something itself."""
        self._slice("coordinator", name, began, ended - began, what)

    def flow(self, number: int, steps: Sequence[tuple[str, float]]) -> None:
        """One sequence's way: an arrow through these rows at these times."""
        last = len(steps) - 1
        for index, (row, at) in enumerate(steps):
            phase = "s" if index == 0 else "f" if index == last else "t"
            event = {"ph": phase, "id": number, "name": "sequence", "cat": "flow", "bp": "e"}
            self._events.append(event | self._at(row, at))

    def count(self, name: str, at: float, values: Mapping[str, float]) -> None:
        """Figures over time."""
        self._events.append({"ph": "C", "name": name, "args": dict(values)} | self._at("coordinator", at))

    @property
    def events(self) -> list[dict[str, Any]]:
        """In the order in which they were noted; to be read when the executor has been closed."""
        return list(self._events)

    def write(self) -> None:
        """Does nothing without a file. Raises OSError."""
        if self._file is None:
            return
        rows = [
            {"ph": "M", "name": "process_name", "pid": row, "tid": 0, "args": {"name": name}}
            for name, row in ROWS.items()
        ]
        whole = {"displayTimeUnit": "ms", "traceEvents": [*rows, *self._events]}
        self._file.write_text(json.dumps(whole), encoding="utf-8")

    def _slice(self, row: str, name: str, began: float, seconds: float, what: dict[str, Any]) -> None:
        event = {"ph": "X", "name": name, "dur": max(0.0, seconds) * 1e6, "args": what}
        self._events.append(event | self._at(row, began))

    def _at(self, row: str, at: float) -> dict[str, Any]:
        return {"ts": (at - self._zero) * 1e6, "pid": ROWS[row], "tid": 0}
