"""A histogram that takes several equal values at once, as the tokens of a round are. Pure.

It is cheap to feed, since the event loop's every microsecond delays somebody; Prometheus's form of it is made
when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Sequence


class Distribution:
    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """`bounds`: upper ones of the buckets, ascending; beyond the last there is one more."""
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, labels: Sequence[str], values: Sequence[str]) -> HistogramMetricFamily:
        """As Prometheus counts: each bucket holds those below it, too."""
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        family.add_metric(values, buckets, self._sum)
        return family
