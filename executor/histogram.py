"""A histogram that takes several equal values at once, as the tokens of a round are. Pure.

It is cheap to feed, since whoever feeds it has more urgent things to do; what reads it can take its time.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Histogram:
    """`bounds`: upper ones of the buckets, ascending; beyond the last there is one more. `sum` is of all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """How many values each bucket and those below it hold; the last is all."""
        return list(accumulate(self._counts))
