"""How often guesses of a kind turned out right, learned while drafting. Pure.

A kind is whatever its source can tell of a guess beforehand, such as the length of a match. What the share of
right ones is hangs on the model and on the texts of the day, so constants only start it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

_START = 8.0
"""A kind's first estimate counts as so many trials."""
_MEMORY = 256.0
"""Trials count less as newer ones come: at most so many are in the balance."""


class Calibration:
    def __init__(self, start: Callable[[Hashable], float]) -> None:
        """`start`: the estimate, 0 … 1, for a kind that has not been tried."""
        self._start = start
        self._of: dict[Hashable, list[float]] = {}

    def expected(self, kind: Hashable) -> float:
        """Probability that a guess of this kind is right."""
        right, trials = self._of.get(kind) or self._fresh(kind)
        return right / trials

    def note(self, kind: Hashable, right: bool) -> None:
        """A guess of this kind was judged."""
        counts = self._of.get(kind) or self._fresh(kind)
        if counts[1] >= _MEMORY:
            counts[0] *= 0.5
            counts[1] *= 0.5
        counts[0] += right
        counts[1] += 1

    def _fresh(self, kind: Hashable) -> list[float]:
        counts = self._of[kind] = [self._start(kind) * _START, _START]
        return counts
