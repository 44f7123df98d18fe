"""The lanes as a user sees them: a snapshot of each, and a few lines that a live view can redraw."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import psutil
from rich.table import Table

from executor.errors import Closed
from executor.lane import LaneState
from executor.request import Acceptance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.lane import Lane
    from executor.llm import LLM


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """`resident_mb` in 10⁶ bytes; `busy_share`: part of the time since `LaneView.begin`, 0 … 1."""

    lane: str
    engine: str
    state: str
    pid: int | None
    resident_mb: float | None
    busy_share: float
    orders: int


class LaneView:
    """Only reads, so that it may be drawn by another thread than the coordinator's."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._began = time.monotonic()
        self._busy_before: dict[str, int] = {}
        self._ended: float | None = None

    def begin(self) -> None:
        """Busy shares count from now on."""
        self._began = time.monotonic()
        self._ended = None
        self._busy_before = {lane.epoch: lane.busy_ns for lane in self._lanes()}

    def end(self) -> None:
        """Busy shares count until now."""
        self._ended = time.monotonic()

    def snapshot(self) -> list[LaneInfo]:
        return [self._info(lane) for lane in self._lanes()]

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(info) for info in self.snapshot()]

    def height(self) -> int:
        return len(self._lanes())

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for info in self.snapshot():
            memory = "-" if info.resident_mb is None else f"{info.resident_mb:.0f} MB"
            table.add_row(
                f"[bold]{info.lane}[/]",
                info.state,
                f"pid {info.pid or '-'}",
                memory,
                f"busy {info.busy_share:4.0%}",
                self._counts(info.lane),
            )
        return table

    def _lanes(self) -> list[Lane]:
        try:
            return self._llm.coordinator.lanes
        except Closed:
            return []  # not started yet

    def _info(self, lane: Lane) -> LaneInfo:
        process = lane.process  # once: the coordinator's thread may set it to None at any time
        pids = process.pids if process is not None else ()
        elapsed_ns = ((self._ended or time.monotonic()) - self._began) * 1e9
        busy_ns = lane.busy_ns - self._busy_before.get(lane.epoch, 0)
        return LaneInfo(
            lane=lane.name,
            engine=lane.spec.engine,
            state=lane.phase if lane.state is LaneState.STARTING else str(lane.state),
            pid=pids[0] if pids else None,
            resident_mb=_resident_mb(pids) if pids else None,
            busy_share=round(min(1.0, busy_ns / elapsed_ns), 4) if elapsed_ns > 0 else 0.0,
            orders=lane.orders,
        )

    def _counts(self, lane: str) -> str:
        # A copy, made in one step of the interpreter: the coordinator's thread goes on counting.
        acceptance = Acceptance(dict(self._llm.coordinator.stats.acceptance.outcomes))
        if lane == "target":
            return f"{acceptance.tokens} tokens"
        return f"{sum(acceptance.drafted)} drafted, {sum(acceptance.accepted)} accepted"


def _resident_mb(pids: Sequence[int]) -> float | None:
    """Of all ranks together."""
    try:
        resident: int = sum(psutil.Process(pid).memory_info().rss for pid in pids)
    except psutil.Error:
        return None
    return round(resident / 1e6, 1)
