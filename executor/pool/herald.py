"""Tells whoever started a speculator server how it is: ready, its lane, its clients, and that it lives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor import notify

if TYPE_CHECKING:
    from executor.lane import Lane
    from executor.notify import Notifier


class Herald:
    def __init__(self, notifier: Notifier, name: str, address: str) -> None:
        """`name`: of what drafts; `address`: where."""
        self._notifier = notifier
        self._name = name
        self._address = address
        self._ready = False
        watchdog = notifier.watchdog_seconds
        self.period = float("inf") if watchdog is None else watchdog / 4
        """So often at least, in seconds, there must be something to hear."""

    def tell(self, lane: Lane, clients: int) -> None:
        """To be called by the loop that serves, so that there is no sign of life without it."""
        self._ready |= lane.serving
        if not self._ready:
            return
        state = "healthy" if lane.serving else "recovering"
        process = lane.process
        self._notifier.say(
            **{
                notify.READY: "1",
                notify.STATUS: f"{state}, {self._name} on {self._address} for {clients} clients",
                notify.URL: self._address,
                notify.HEALTH: state,
                notify.LANES: f"{lane.name}:{process.pid}" if process is not None else "",
            }
        )
        if self._notifier.watchdog_seconds is not None:
            self._notifier.alive()

    def stopping(self) -> None:
        self._notifier.say(**{notify.STOPPING: "1"})
