"""Verification capacity: how many guesses of each sequence are worth the target's time. Pure.

A guess counts only if all before it are right. So its worth is the product of the probabilities of all up
to it, and that falls along a draft: the best choice within a budget takes the worthiest guesses of all
sequences, which always are the first ones of each.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

UNKNOWN = 0.5
"""Probability of a guess about which its speculator says nothing."""


def capacities(lengths: Sequence[int], confidences: Sequence[Sequence[float]], budget: int) -> list[int]:
    """How many of each draft to verify, `budget` in total at most.

    lengths: of the drafts; confidences: for each draft the probability that the target samples a guess where
    all before it are right, possibly for its first guesses only.
    """
    worths = []
    for index, (length, known) in enumerate(zip(lengths, confidences, strict=True)):
        chances = [min(1.0, max(0.0, chance)) for chance in known[:length]]
        chances += [UNKNOWN] * (length - len(chances))
        worths += [(-worth, place, index) for place, worth in enumerate(accumulate(chances, mul))]
    chosen = [0] * len(lengths)
    for _, _, index in sorted(worths)[: max(0, budget)]:
        chosen[index] += 1
    return chosen
