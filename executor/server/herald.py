"""Tells whoever started the server how it is: ready, its health, its lanes' processes, and that it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor import notify

if TYPE_CHECKING:
    from executor.lane import Lane
    from executor.llm import LLM
    from executor.notify import Notifier


class Herald:
    def __init__(self, notifier: Notifier, llm: LLM, url: str) -> None:
        self._notifier = notifier
        self._llm = llm
        self._url = url
        watchdog = notifier.watchdog_seconds
        self._patience = None if watchdog is None else watchdog / 2
        self.period = float("inf") if watchdog is None else watchdog / 4
        """So often at least, in seconds, there must be something to hear."""

    def tell(self, now: float) -> None:
        """`now`: of time.monotonic. There is no sign of life while the coordinator's thread gives none."""
        coordinator = self._llm.coordinator
        health, lanes = coordinator.health, coordinator.lanes
        because = f" ({health.reason})" if health.reason else ""
        pids = ",".join(f"{name}:{pid}" for lane in lanes for name, pid in _processes(lane))
        self._notifier.say(
            **{
                notify.READY: "1",
                notify.STATUS: f"{health.state} on {self._url}{because}",
                notify.URL: self._url,
                notify.HEALTH: health.state,
                notify.LANES: pids,
            }
        )
        if self._patience is not None and now - coordinator.turned_at < self._patience:
            self._notifier.alive()

    def stopping(self) -> None:
        self._notifier.say(**{notify.STOPPING: "1"})


def _processes(lane: Lane) -> list[tuple[str, int]]:
    """By name: `target`, and the other ranks `target/1` and on. None while it has no process."""
    process = lane.process  # once: it may be gone at any moment
    pids = process.pids if process is not None else ()
    return [(f"{lane.name}/{rank}" if rank else lane.name, pid) for rank, pid in enumerate(pids)]
