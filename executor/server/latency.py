"""Histograms as Prometheus counts them, made when it asks. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily

from executor.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Sequence


class Distribution(Histogram):
    """A histogram with the name that it is scraped by."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        super().__init__(bounds)
        self._name = name
        self._text = text

    def family(self, labels: Sequence[str], values: Sequence[str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self._name, self._text, labels=labels)
        add(family, values, self)
        return family


def add(family: HistogramMetricFamily, values: Sequence[str], histogram: Histogram) -> None:
    """One more labelled histogram of a family: each bucket holds those below it, too."""
    names = [*(str(float(bound)) for bound in histogram.bounds), "+Inf"]
    buckets = list(zip(names, histogram.cumulative(), strict=True))
    family.add_metric(values, buckets, histogram.sum)
