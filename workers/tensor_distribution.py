"""`workers.distribution` on tensors: float64 weights of a whole vocabulary, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ipc import q_rows
from ipc.messages import QRow

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from workers.q_row import Q


class TensorDistribution:
    """See workers.distribution.Distribution."""

    def __init__(self, weights: Tensor, best: Callable[[int], Tensor]) -> None:
        """`weights`: float64 [vocabulary], 0 for what cannot be sampled; they need not sum to 1. `best(n)`:
        ids of at least as many of the likeliest tokens as have a weight, up to n, best first."""
        self._weights = weights
        self._total = float(weights.sum())
        self._best = best

    def probability(self, token: int) -> float:
        return float(self._weights[token]) / self._total

    @torch.inference_mode()
    def overlap(self, q: Q, reach: float) -> float:
        named, probabilities = self._tensors(q)
        own = self._weights if named is None else self._weights[named]
        return float(torch.minimum(own * (reach / self._total), probabilities).sum())

    @torch.inference_mode()
    def beyond(self, q: Q, reach: float, fraction: float) -> int:
        left = self._weights * (reach / self._total)
        named, probabilities = self._tensors(q)
        if named is None:
            left -= probabilities
        else:
            left[named] -= probabilities
        left.clamp_(min=0.0)
        # Nothing is left if p is q, and then nothing is rejected but by the rounding of a quotient.
        return pick(left if bool(left.any()) else self._weights, fraction)

    @torch.inference_mode()
    def row(self, width: int) -> QRow:
        if width == q_rows.ALL:
            return QRow(b"", self._weights.float().cpu().numpy().tobytes())
        tokens = self._best(width)
        weights = self._weights[tokens].float()
        kept = int((weights > 0.0).sum())  # best first, so those without a weight are the last ones
        return QRow(tokens[:kept].int().cpu().numpy().tobytes(), weights[:kept].cpu().numpy().tobytes())

    def _tensors(self, q: Q) -> tuple[Tensor | None, Tensor]:
        """Ids of the tokens that q names, None for all, and their probabilities, float64."""
        device = self._weights.device
        probabilities = torch.from_numpy(np.array(q.weights, dtype=np.float64)).to(device) / q.total
        if q.tokens is None:
            return None, probabilities
        return torch.from_numpy(np.array(q.tokens, dtype=np.int64)).to(device), probabilities


def pick(weights: Tensor, fraction: float) -> int:
    """`workers.distribution.pick` of float64 weights [n]."""
    sums = weights.cumsum(dim=0)
    index = int(torch.searchsorted(sums, fraction * sums[-1], right=True))
    return index if index < len(sums) else int(weights.nonzero()[-1])
