"""How long streams paused: a histogram of bounded size, since a run may last for days. Pure; not locked."""

from __future__ import annotations

import math

_SHORTEST = 1e-6
_STEPS_PER_DECADE = 100
_DECADES = 11


class Gaps:
    """Durations in seconds, kept to 2.4 per cent (100 bins per decade); the longest is exact."""

    def __init__(self) -> None:
        self._bins = [0] * (_STEPS_PER_DECADE * _DECADES)
        self.count = 0
        self.longest = 0.0

    def record(self, seconds: float) -> None:
        decades = math.log10(max(seconds, _SHORTEST) / _SHORTEST)
        self._bins[min(int(decades * _STEPS_PER_DECADE), len(self._bins) - 1)] += 1
        self.count += 1
        self.longest = max(self.longest, seconds)

    def percentile(self, share: float) -> float:
        """Upper edge of the bin that holds the nearest-rank percentile, in seconds; 0 if there is none."""
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for i, count in enumerate(self._bins):
            seen += count
            if seen >= rank:
                return min(self.longest, _SHORTEST * math.pow(10, (i + 1) / _STEPS_PER_DECADE))
        return 0.0
