"""How long a round waits for drafts: about as long as they usually take. Pure; the clock is the caller's.

Smoothed time and deviation as TCP keeps them for its retransmission timer (RFC 6298), of a draft of a token,
since orders differ in how much they ask for.
"""

from __future__ import annotations

_MEAN_GAIN = 1 / 8
_DEVIATION_GAIN = 1 / 4
_DEVIATIONS = 4
_MARGIN = 2
"""A draft may take so many times its usual time: a plain step costs more than a little patience."""
_READ_PER_DRAFTED = 1 / 8
"""Cost of reading a known token, in drafted ones. Often it is less, which only makes us patient."""


def work(k: int, news: int) -> float:
    """Of an order whose longest draft has `k` tokens, and whose sequences have `news` tokens more to read."""
    return k + news * _READ_PER_DRAFTED


class DraftPace:
    """Of one speculator's model, through all incarnations of its lane. Times in seconds."""

    def __init__(self, least: float, most: float) -> None:
        """No wait is shorter than `least` or longer than `most`, which counts if they contradict."""
        self._least = least
        self._most = most
        self._mean: float | None = None
        self._deviation = 0.0

    def patience(self, work: float) -> float:
        """How long to wait for an order of so much work."""
        if self._mean is None:
            return self._most
        usual = work * (_MARGIN * self._mean + _DEVIATIONS * self._deviation)
        return min(max(usual, self._least), self._most)

    def note(self, work: float, seconds: float) -> None:
        """An order of so much work was answered after so long, even if nobody waited any more.

        Counts twice the patience at most: one long pause must not make us patient for ever.
        """
        seconds = min(seconds, 2 * self.patience(work)) / work
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += _DEVIATION_GAIN * (abs(seconds - self._mean) - self._deviation)
        self._mean += _MEAN_GAIN * (seconds - self._mean)
