"""What changes a row of logits before it is sampled: bias, penalties, masks. One definition for all engines.

The order is that of vLLM's sampler: bias, repetition penalty, frequency and presence penalty, then masks. All
of it is float32 arithmetic of numpy on single tokens, so the result is the same beside whatever other rows,
and for whatever device the logits come from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class RowEdit(NamedTuple):
    """`tokens` int64 [n], ascending, are those whose logits change; the next four are theirs, float32 [n].

    repetition: divides positive logits and multiplies others; 1 where there is none (CTRL, arXiv 1909.05858).
    penalty: what frequency and presence take from the logit.
    allowed: bool [V] of what may be sampled; None is everything. It is never empty.
    """

    tokens: NDArray[np.int64]
    bias: NDArray[np.float32]
    repetition: NDArray[np.float32]
    penalty: NDArray[np.float32]
    allowed: NDArray[np.bool_] | None

    def applied(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The edited copy of a row [V]; what is not allowed is -inf."""
        edited = logits.copy()
        values = edited[self.tokens] + self.bias
        values = np.where(values > 0, values / self.repetition, values * self.repetition)
        edited[self.tokens] = values - self.penalty
        if self.allowed is not None:
            edited[~self.allowed] = -np.inf
        return edited
