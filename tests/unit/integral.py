"""The distribution of what a piece of code does, by enumeration: it is run once for every cell of its noise.

A cell is all noise for which every decision comes out the same, and its probability is known exactly. Noise
is named by its key: code that takes the same noise for two decisions gets what the first has left over.

* A fraction in [0, 1) (`noise.fraction`) decides by `rejection.stands` and by `pick`: cells are intervals.
* A row of Gumbel noise decides by `noisy_best`: the token with the smallest E / weight, E exponential. Twice
  at most, since the cells of two such decisions have a closed form.

Every decision is made by the code itself, over noise from the middle of the cell, and must come out as meant.
What a row of Gumbel noise decides, it decides when that is first looked at: if never, all of it is one cell.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unittest import mock

from workers import distribution, noise, pure_sampler, rejection, sampler, tensor_distribution

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

LEAST = 1e-18
"""Cells below this probability are left out."""


class Fraction(float):
    """Stands for all of an interval of fractions."""

    key: tuple[int, ...]

    def __new__(cls, *key: int) -> Fraction:
        self = super().__new__(cls, math.nan)  # so that nobody else decides by it
        self.key = key
        return self


class Later(int):
    """A token that is decided when somebody looks at it; who does so past Python sees one that is none."""

    _decide: Callable[[], int]

    def __new__(cls, decide: Callable[[], int]) -> Later:
        self = super().__new__(cls, -1)
        self._decide = cache(decide)
        return self

    def __int__(self) -> int:
        return self._decide()

    __index__ = __int__

    def __eq__(self, other: object) -> bool:
        return self._decide() == other

    def __ne__(self, other: object) -> bool:
        return self._decide() != other

    def __lt__(self, other: int) -> bool:
        return self._decide() < other

    def __le__(self, other: int) -> bool:
        return self._decide() <= other

    def __gt__(self, other: int) -> bool:
        return self._decide() > other

    def __ge__(self, other: int) -> bool:
        return self._decide() >= other

    def __hash__(self) -> int:
        return hash(self._decide())


class Integral:
    def __init__(self, name: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda key: key) -> None:
        """`name`: what is known of the keys of fractions; it may forget a part of them."""
        self._name = name
        self._plan: list[int] = []
        self._begin()

    def of(self, run: Callable[[], Hashable]) -> dict[Any, float]:
        """Probability of each result of `run`."""
        found: dict[Any, float] = defaultdict(float)
        self._plan = []
        with self._noise():
            while True:
                self._begin()
                result = run()
                found[result] += self.probability
                # The next cell in the order of a counter whose last digit is the last decision.
                while self._made and self._made[-1][0] + 1 == self._made[-1][1]:
                    self._made.pop()
                if not self._made:
                    return dict(found)
                self._plan = [index for index, _ in self._made]
                self._plan[-1] += 1

    def _begin(self) -> None:
        self.probability = 1.0
        self._made: list[tuple[int, int]] = []
        self._intervals: dict[tuple[int, ...], tuple[float, float]] = {}
        self._races: dict[noise.Key, tuple[dict[int, float], int]] = {}

    def _choose(self, chances: Sequence[float]) -> int:
        """Index of the cell that this run is in, of those that have a probability."""
        possible = [index for index, chance in enumerate(chances) if chance > LEAST]
        place = len(self._made)
        index = self._plan[place] if place < len(self._plan) else 0
        self._made.append((index, len(possible)))
        self.probability *= chances[possible[index]]
        return possible[index]

    # ------------------------------------------------------------ fractions

    def _narrow(self, fraction: Fraction, ends: Sequence[float]) -> tuple[int, float]:
        """Which of the intervals that end there, and the middle of what is left of it."""
        low, high = self._intervals.get(fraction.key, (0.0, 1.0))
        starts = (0.0, *ends[:-1])
        cells = [
            (max(low, start), max(low, start, min(high, end)))
            for start, end in zip(starts, ends, strict=True)
        ]
        chosen = self._choose([(end - start) / (high - low) for start, end in cells])
        self._intervals[fraction.key] = cells[chosen]
        return chosen, sum(cells[chosen]) / 2

    def _stands(self, real: Callable[..., bool], fraction: Fraction, chance: float) -> bool:
        index, middle = self._narrow(fraction, [min(1.0, max(0.0, chance)), 1.0])
        assert real(middle, chance) == (index == 0)
        return index == 0

    def _pick(self, real: Callable[..., int], weights: Any, fraction: Fraction) -> int:
        listed = [float(weight) for weight in weights]
        total = math.fsum(listed)
        ends = [math.fsum(listed[: index + 1]) / total for index in range(len(listed))]
        index, middle = self._narrow(fraction, ends)
        assert real(weights, middle) == index
        return index

    # ------------------------------------------------------------ Gumbel noise

    def _noisy_best(self, real: Callable[..., int], *about: Any) -> Later:
        return Later(lambda: self._race(real, *about))

    def _race(
        self, real: Callable[..., int], tokens: Sequence[int], logits: Sequence[float], best: float, draw: Any
    ) -> int:
        key = noise.key(draw.sampling.seed, draw.position)
        raw = [math.exp((logit - best) / draw.sampling.temperature) for logit in logits]
        weights = {token: weight / math.fsum(raw) for token, weight in zip(tokens, raw, strict=True)}
        if key not in self._races:
            chosen = tokens[self._choose([weights[token] for token in tokens])]
            waits = {token: weight or 1.0 for token, weight in weights.items()}
            waits[chosen] *= 0.5
            self._races[key] = weights, chosen
        else:
            first, won = self._races.pop(key)  # a third decision would look like a first one, and fail
            cells = [both(first, won, weights, token) for token in tokens]
            chosen = tokens[self._choose([chance / first[won] for chance, _ in cells])]
            waits = cells[list(tokens).index(chosen)][1]
        with mock.patch.object(noise, "gumbel", lambda _, token: -math.log(waits[token])):
            assert real(tokens, logits, best, draw) == chosen
        return chosen

    @contextmanager
    def _noise(self) -> Iterator[None]:
        places = [
            (rejection, "stands", self._stands),
            (distribution, "pick", self._pick),
            (tensor_distribution, "pick", self._pick),
            (pure_sampler, "noisy_best", self._noisy_best),
            (sampler, "noisy_best", self._noisy_best),
        ]
        with ExitStack() as stack:
            for module, name, decide in places:
                real = getattr(module, name)
                made = lambda *args, real=real, decide=decide: decide(real, *args)  # noqa: E731
                stack.enter_context(mock.patch.object(module, name, made))
            named = lambda *key: Fraction(*self._name(key))  # noqa: E731
            stack.enter_context(mock.patch.object(noise, "fraction", named))
            yield


def both(q: dict[int, float], d: int, p: dict[int, float], s: int) -> tuple[float, dict[int, float]]:
    """Probability that the same exponentials E have d with the smallest E / q and s with the smallest E / p,
    and such an E in the middle of it.

    With a = E_s, b = E_d and r = b / a all others must be above max(a p_j / p_s, b q_j / q_d). Integrated
    over a and the others that leaves 1 / g(r)², with g(r) = 1 + r + Σ_j max(p_j / p_s, r q_j / q_d), over r
    from p_d / p_s to q_d / q_s: g is linear between the r at which the two of a maximum are equal. If d is s,
    there is no r, and it is 1 / (1 + Σ_j max(p_j / p_s, q_j / q_s)).
    """
    others = (set(q) | set(p)) - {d, s}

    def least(token: int, r: float) -> float:
        return max(p.get(token, 0.0) / p[s], r * q.get(token, 0.0) / q[d])

    if d == s:
        total = 1.0 + sum(least(token, 1.0) for token in others)
        return 1.0 / total, {s: 1.0, **{token: 1.5 * least(token, 1.0) + 1e-9 for token in others}}
    low = p.get(d, 0.0) / p[s]
    high = q[d] / q[s] if q.get(s, 0.0) > 0.0 else math.inf
    if not low < high:
        return 0.0, {}
    turns = [p.get(j, 0.0) * q[d] / (p[s] * q[j]) for j in others if q.get(j, 0.0) > 0.0]
    cuts = [low, *sorted(turn for turn in turns if low < turn < high), high]

    def g(r: float) -> float:
        return 1.0 + r + sum(least(token, r) for token in others)

    chance = 0.0
    for start, end in pairwise(cuts):
        if math.isinf(end):
            slope = g(start + 1.0) - g(start)
            chance += 1.0 / (slope * g(start))
        else:
            chance += (end - start) / (g(start) * g(end))
    r = (low + high) / 2 if math.isfinite(high) else low + 1.0
    return chance, {s: 1.0, d: r, **{token: 1.5 * least(token, r) + 1e-9 for token in others}}
