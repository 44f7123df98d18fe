"""Which verdicts on a draft are likely, learned from those that were given. Pure.

A verdict is a number of accepted tokens and the token that follows. After fewer than all, that is one of the
tokens which the speculator held for less likely than its guess; after all of them, it is probably the guess
that it would have made next. So the chances fall geometrically along the draft, as the acceptance does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

ALTERNATIVES = 4
"""Of the tokens after its guess, a speculator names so many."""
_START_RIGHT = 0.5
_START_RANKS = (0.3, 0.12, 0.08, 0.05)
_START = 4.0
_MEMORY = 128.0
"""Verdicts count less as newer ones come: at most so many are in the balance."""


class Hypothesis(NamedTuple):
    """A verdict that may be given: `n_accepted` tokens stand, `next_token` follows."""

    n_accepted: int
    next_token: int


class Outcomes:
    """How often a guess at each place was right, and which place the right token had among the others."""

    def __init__(self) -> None:
        self._right: list[_Share] = []
        self._ranks = [_Share(start) for start in _START_RANKS]

    def note(self, draft: Sequence[int], others: Sequence[Sequence[int]], verdict: Hypothesis) -> None:
        """A verdict on a draft. `others`: at each of its places, the tokens that were held for less likely,
        the likeliest first."""
        n_accepted, next_token = verdict
        for place in range(min(n_accepted + 1, len(draft))):
            self._at(place).note(place < n_accepted)
        if n_accepted < len(draft) and n_accepted < len(others):
            found = [token == next_token for token in others[n_accepted][:ALTERNATIVES]]
            for share, right in zip(self._ranks, found, strict=False):
                share.note(right)

    def likeliest(
        self, ahead: Sequence[int], others: Sequence[Sequence[int]], after: Sequence[int], count: int
    ) -> list[Hypothesis]:
        """Up to `count` verdicts on the draft `ahead`, the likeliest first.

        `others`: as in `note`. `after`: tokens that may follow the whole draft, the likeliest first.
        """
        chances: list[tuple[float, Hypothesis]] = []
        reach = 1.0
        for place in range(len(ahead)):
            right = self._at(place).share
            if place < len(others):
                chances += self._others(reach * (1 - right), place, others[place])
            reach *= right
        if after:
            right = self._at(len(ahead)).share
            chances.append((reach * right, Hypothesis(len(ahead), after[0])))
            chances += self._others(reach * (1 - right), len(ahead), after[1:])
        chances.sort(key=lambda chance: -chance[0])
        return [hypothesis for _, hypothesis in chances[:count]]

    def _others(self, reach: float, place: int, tokens: Sequence[int]) -> list[tuple[float, Hypothesis]]:
        return [
            (reach * share.share, Hypothesis(place, token))
            for share, token in zip(self._ranks, tokens, strict=False)
        ]

    def _at(self, place: int) -> _Share:
        while len(self._right) <= place:
            self._right.append(_Share(self._right[-1].share if self._right else _START_RIGHT))
        return self._right[place]


class _Share:
    """Of trials that came out right; old ones fade."""

    __slots__ = ("_right", "_trials")

    def __init__(self, start: float) -> None:
        self._right, self._trials = start * _START, _START

    @property
    def share(self) -> float:
        return self._right / self._trials

    def note(self, right: bool) -> None:
        if self._trials >= _MEMORY:
            self._right /= 2
            self._trials /= 2
        self._right += right
        self._trials += 1
