"""Whose orders may be what ends the lane: such clients are served alone, barred if it goes on. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

STRIKES = 5
"""More than an executor needs to give up the one sequence that does it, so that it can help itself."""
BARRED_SECONDS = 60.0


class Suspects:
    def __init__(self) -> None:
        self._deaths: Counter[str] = Counter()
        self._barred: dict[str, float] = {}

    def died(self, names: Iterable[str], now: float) -> None:
        """The lane died while it drafted for these."""
        for name in names:
            self._deaths[name] += 1
            if self._deaths[name] >= STRIKES:
                self._barred[name] = now + BARRED_SECONDS
                del self._deaths[name]

    def answered(self, names: Iterable[str]) -> None:
        """It did not."""
        for name in names:
            self._deaths.pop(name, None)

    def alone(self, name: str) -> bool:
        return name in self._deaths

    def barred(self, name: str, now: float) -> float:
        """For how many seconds more; 0 for all who are not."""
        until = self._barred.get(name, 0.0)
        if until <= now:
            self._barred.pop(name, None)
        return max(0.0, until - now)
