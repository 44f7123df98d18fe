"""What speculation costs and brings on this machine, as measured: the figures that a setting is chosen by.
Pure.

Times in seconds, for so many sequences at once. Everything fades, so that what changes is noticed.
"""

from __future__ import annotations

import math
from copy import copy
from functools import partial
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ipc.messages import StepTime

T = TypeVar("T")

_FADE = 0.97
"""What an observation counts for once the next one of its kind has come."""
_MEMORY_SECONDS = 1.0
"""What was accepted counts for 1/e of itself so much later."""
_ENOUGH = 3.5
"""Observations, of which the older ones count for less."""
_DOUBTFUL = 0.1
_MOST_TIMES = 3.0
_USUAL_FADE = 0.99
_REACHED_FADE = 0.98
_PRIOR_WEIGHT = 4.0
_CONTENTION_FADE = 0.9
_MOST_CONTENTION = 4.0
_SHARED_CORES = 2.0
_START_ACCEPTANCE = 0.6
_START_HIT = {0: 0.0, 1: 0.3}
_START_HIT_MANY = 0.6


class Outcome(NamedTuple):
    """Of one sequence's draft: its length, and how much of it stood."""

    drafted: int
    accepted: int

    @property
    def tokens(self) -> int:
        """What was accepted, and the target's own."""
        return self.accepted + 1


class Line:
    """y = a + b x through observations by least squares; of a single x a constant, or else in proportion to
    x.
    """

    def __init__(self, fade: float = _FADE, *, proportional: bool = False) -> None:
        self._fade = fade
        self._proportional = proportional
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._sure = False

    @property
    def sure(self) -> bool:
        """Whether it goes through some observations, or once did."""
        return self._sure

    def doubt(self) -> None:
        """What was seen counts for next to nothing against what comes."""
        if self.sure:
            self._fade_to(_DOUBTFUL)

    def like(self) -> Line:
        """One to begin with, for what is not much different: it counts for no more than the least that is
        sure.
        """
        line = copy(self)
        line._fade_to(_ENOUGH)
        line._sure = line._n >= _ENOUGH
        return line

    def _fade_to(self, most: float) -> None:
        """Count for no more than so many observations."""
        if self._n > most:
            share = most / self._n
            self._n, self._x, self._y = share * self._n, share * self._x, share * self._y
            self._xx, self._xy = share * self._xx, share * self._xy

    def note(self, x: float, y: float) -> None:
        if self.sure:
            y = min(y, _MOST_TIMES * self.at(x))  # what was held up by something else says little
        fade = self._fade
        self._n, self._x, self._y = fade * self._n + 1, fade * self._x + x, fade * self._y + y
        self._xx, self._xy = fade * self._xx + x * x, fade * self._xy + x * y
        self._sure = self._sure or self._n >= _ENOUGH

    def at(self, x: float) -> float:
        """Never falls with x, and goes towards zero no faster than x does: what else comes out is noise, and
        far from what was seen it would promise anything."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        slope = 0.0
        if spread > 1e-9 * max(1.0, mean_x * mean_x):
            slope = max(0.0, (self._xy / self._n - mean_x * mean_y) / spread)
            slope = min(slope, mean_y / mean_x)
        elif self._proportional:
            slope = mean_y / mean_x
        return max(0.0, mean_y + slope * (x - mean_x))


class Mean:
    def __init__(self, start: float | None = None, fade: float = _FADE) -> None:
        self._fade = fade
        self._weight = 0.0 if start is None else 1.0
        self._sum = start or 0.0

    @property
    def empty(self) -> bool:
        return self._weight == 0.0

    @property
    def sure(self) -> bool:
        """Whether it is of some observations."""
        return self._weight >= _ENOUGH

    @property
    def value(self) -> float:
        return self._sum / self._weight

    def with_prior(self, value: float, weight: float) -> float:
        """The mean if `value` had been seen so often besides."""
        return (self._sum + value * weight) / (self._weight + weight)

    def fade(self, share: float) -> None:
        """What there is counts for less against what comes."""
        self._weight *= share
        self._sum *= share

    def note(self, value: float, weight: float = 1.0) -> None:
        self._weight = self._weight * self._fade + weight
        self._sum = self._sum * self._fade + value * weight


class Costs:
    def __init__(self) -> None:
        self._verify: dict[int, Line] = {}
        self._draft: dict[int, Line] = {}
        self._hit: dict[int, Mean] = {}
        self._right: list[Mean] = []
        self._reached: list[Mean] = []
        self._usual = Mean(_START_ACCEPTANCE, _USUAL_FADE)
        self._rest = Mean(0.0)
        self._way = Mean(None)
        self._contention = Mean(1.0, _CONTENTION_FADE)
        self._rehearsed = self._drafted = False

    # ------------------------------------------------------------ observations

    def rehearsed(self, steps: Sequence[StepTime]) -> None:
        """What the target found before it served: as good as having verified each often enough to be sure."""
        for _ in range(math.ceil(_ENOUGH)):
            for step in steps:
                self._verify.setdefault(size_class(step.sequences), Line()).note(step.rows, step.seconds)
        self._rehearsed = len(steps) > 0

    def contend(self) -> None:
        """Both lanes compute on the same cores: one will take twice the time while the other computes, too,
        as long as nothing else was measured."""
        self._contention = Mean(_SHARED_CORES, _CONTENTION_FADE)

    def verified(self, sequences: int, rows: int, seconds: float) -> None:
        """The target ran so many rows of logits of so many sequences."""
        _line(self._verify, sequences, Line).note(rows, seconds)

    def overlapped(self, sequences: int, rows: int, seconds: float, beside: float = math.inf) -> None:
        """The target ran them while the speculator computed, too, for so many seconds or longer."""
        alone = self.verify(sequences, rows)
        if seconds < alone:  # alone it would not have taken longer
            self.verified(sequences, rows, seconds)
        both = min(alone, beside)
        if both > 0:
            self._contention.note(min(max(1.0, 1 + (seconds - alone) / both), _MOST_CONTENTION))

    def drafted(self, sequences: int, steps: int, seconds: float) -> None:
        """The speculator was asked for so many steps for so many sequences. An order costs something
        besides, and the very first one more than others do: it says nothing.
        """
        if self._drafted:
            _line(self._draft, sequences, partial(Line, proportional=True)).note(steps, seconds)
        self._drafted = True

    def doubt_drafts(self) -> None:
        """How long they take was seen long ago."""
        for line in self._draft.values():
            line.doubt()

    def judged(self, outcome: Outcome, asked: int) -> None:
        """`asked`: for so many tokens the speculator was asked; a place that it left empty is as good as
        wrong.
        """
        for place in range(min(outcome.accepted + 1, asked)):
            if len(self._right) == place:
                self._right.append(Mean(None, 1.0))
            self._right[place].note(float(place < outcome.accepted))
        if asked:
            self._usual.note(float(outcome.accepted > 0))

    def ended(self, drafted: int, k: int) -> None:
        """A draft of at most k tokens ended after so many: its speculator found more not worth it."""
        for place in range(k):
            if len(self._reached) == place:
                self._reached.append(Mean(None, _REACHED_FADE))
            self._reached[place].note(float(place < drafted))

    def passed(self, seconds: float) -> None:
        """So long after what was judged before."""
        share = math.exp(-seconds / _MEMORY_SECONDS)
        for mean in self._right:
            mean.fade(share)

    def guessed(self, hypotheses: int, *, hits: int, misses: int) -> None:
        """So many verdicts were among those guessed, and so many were not."""
        self._hit_of(hypotheses).note(hits / (hits + misses), hits + misses)

    def fetched(self, seconds: float) -> None:
        """So long a draft took beyond what was computed for it."""
        self._way.note(seconds)

    def rest(self, seconds: float) -> None:
        """Of a round, what neither lane computed."""
        self._rest.note(seconds)

    # ------------------------------------------------------------ figures

    @property
    def known(self) -> bool:
        """Whether both lanes have been measured, and not only once."""
        return all(any(line.sure for line in lines.values()) for lines in (self._verify, self._draft))

    @property
    def comparable(self) -> bool:
        """Whether settings can be compared: where only the drafts' time is not known, it is hoped for."""
        return self._rehearsed or self.known

    @property
    def draft_known(self) -> bool:
        return bool(self._draft)

    @property
    def contention(self) -> float:
        """How many times as long the target takes while the speculator computes, too."""
        return self._contention.value

    @property
    def between(self) -> float:
        """Seconds of a round that neither lane computes."""
        return self._rest.value

    @property
    def way(self) -> float:
        """Seconds from the end of a verification to a draft and back, beyond its computing."""
        return self._way.value if self._way.sure else self.between

    def verify(self, sequences: int, rows: float) -> float:
        line = _nearest(self._verify, size_class(sequences))
        return line.at(rows)

    def verify_drafts(self, sequences: int, k: int) -> float:
        """Of drafts of at most k tokens each, as long as such drafts usually are."""
        length = sum(_by_place(self._reached, 1.0, k))
        return self.verify(sequences, sequences * (1 + length))

    def draft(self, sequences: int, k: int) -> float:
        """Nothing, as long as nobody has drafted a few times: who is hoped to be fast is tried."""
        if not any(line.sure for line in self._draft.values()):
            return 0.0
        return _nearest(self._draft, size_class(sequences)).at(k)

    def hit(self, hypotheses: int) -> float:
        return self._hit_of(hypotheses).value if hypotheses else 0.0

    def acceptance(self, place: int) -> float:
        """How likely a guess at this place is right if all before it are.

        Where little was seen lately, it is about as likely as one place before, the first as likely as usual.
        """
        *_, value = _by_place(self._right, self._usual.value, place + 1)
        return value

    def tokens(self, k: int) -> float:
        """Expected tokens of a verification of a draft of k: accepted ones, and the target's own.

        1 + a₁ + a₁a₂ + …, with the acceptance a by place (arXiv 2211.17192, equation 1, for one a).
        """
        reaches = accumulate(_by_place(self._right, self._usual.value, k), mul)
        return float(sum(reaches, 1.0))

    def _hit_of(self, hypotheses: int) -> Mean:
        many = min(hypotheses, 2)
        if many not in self._hit:
            self._hit[many] = Mean(_START_HIT.get(many, _START_HIT_MANY))
        return self._hit[many]


def _by_place(means: Sequence[Mean], first: float, k: int) -> Iterator[float]:
    """Of the first k places. Where little was seen it is about as one place before, at first as `first`."""
    value = first
    for place in range(k):
        if place < len(means):
            value = means[place].with_prior(value, _PRIOR_WEIGHT)
        yield value


def size_class(sequences: int) -> int:
    """Numbers of sequences that cost about alike: powers of two, rounded up."""
    return max(0, sequences - 1).bit_length()


def _line(lines: dict[int, Line], sequences: int, fresh: Callable[[], Line]) -> Line:
    """Of so many sequences. At first it is that of the number nearest to it, if there is one."""
    size = size_class(sequences)
    if size not in lines:
        lines[size] = _nearest(lines, size).like() if lines else fresh()
    return lines[size]


def _nearest(table: dict[int, T], size: int) -> T:
    return table[min(table, key=lambda known: (abs(known - size), known))]
