"""What a row of logits is sampled from, once it was edited, divided by the temperature and filtered: p.

Pure Python: the definition, and for engines without torch. `workers.tensor_distribution` is the same on
tensors. Must not import torch or numpy.
"""

from __future__ import annotations

import math
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from ipc import q_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import QRow
    from workers.q_row import Q


class Distribution(Protocol):
    """`reach`, 0 … 1, is a factor of p: how probable it is that what precedes this token stands."""

    def probability(self, token: int) -> float:
        """p of a token."""
        ...

    def overlap(self, q: Q, reach: float) -> float:
        """Sum over tokens of min(reach · p, q)."""
        ...

    def beyond(self, q: Q, reach: float, fraction: float) -> int:
        """The token at this fraction, 0 … 1, of the mass of (reach · p - q)⁺."""
        ...

    def row(self, width: int) -> QRow:
        """The likeliest `width` tokens and their weights, or all tokens' for ipc.q_rows.ALL, in float32."""
        ...


class PureDistribution:
    def __init__(self, tokens: Sequence[int], weights: Sequence[float], size: int) -> None:
        """`tokens`: those that can be sampled, best first; `weights`: theirs, which need not sum to 1.
        `size`: of the vocabulary."""
        self._tokens = tokens
        self._weights = dict(zip(tokens, weights, strict=True))
        self._total = math.fsum(weights)
        self._size = size

    def probability(self, token: int) -> float:
        return self._weights.get(token, 0.0) / self._total

    def overlap(self, q: Q, reach: float) -> float:
        return math.fsum(min(reach * self.probability(token), q.probability(token)) for token in q.named)

    def beyond(self, q: Q, reach: float, fraction: float) -> int:
        tokens = sorted(self._tokens)
        named = set(q.named)
        left = [
            max(0.0, reach * self.probability(token) - (q.probability(token) if token in named else 0.0))
            for token in tokens
        ]
        # Nothing is left if p is q, and then nothing is rejected but by the rounding of a quotient.
        return tokens[pick(left if any(left) else [self._weights[token] for token in tokens], fraction)]

    def row(self, width: int) -> QRow:
        if width == q_rows.ALL:
            return q_rows.pack(None, [self._weights.get(token, 0.0) for token in range(self._size)])
        best = self._tokens[:width]
        return q_rows.pack(best, [self._weights[token] for token in best])


def pick(weights: Sequence[float], fraction: float) -> int:
    """Index of the weight at this fraction, 0 … 1 and below 1, of their sum: one number draws a token.

    Weights of 0 are never picked, as long as there are others.
    """
    sums = list(accumulate(weights, initial=0.0))
    wanted = fraction * sums[-1]
    for index, reached in enumerate(sums[1:]):
        if reached > wanted:
            return index
    return max(index for index, weight in enumerate(weights) if weight > 0.0)
