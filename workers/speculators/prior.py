"""What a model is known to write: a shipped table of short contexts and what mostly followed them.

Made by deploy/train from text that the target wrote itself.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import TYPE_CHECKING

import numpy as np
from safetensors import SafetensorError, safe_open

from workers.speculators.history import Guess

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

LONGEST = 4
"""Tokens of context at most."""
OF = 16
"""Shares are kept as so many parts of one."""
_START, _MULTIPLIER = 0xD1B54A32D192ED03, 0x9E3779B97F4A7C15
"""Odd numbers without a pattern: small ids must not cancel out."""
_MASK64 = (1 << 64) - 1


def keys(contexts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """Fingerprints of contexts [n, length]; those of other lengths differ, too. See `_keys`."""
    mixed = np.full(len(contexts), _START, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for column in contexts.T[::-1]:
            mixed = (mixed ^ column.astype(np.uint64)) * np.uint64(_MULTIPLIER)
            mixed ^= mixed >> np.uint64(29)
    return (mixed >> np.uint64(32)).astype(np.uint32)


class Prior:
    def __init__(self, file: Path) -> None:
        """Raises OSError or ValueError for a file that is none."""
        try:
            with safe_open(str(file), framework="np") as tensors:
                parts = [tensors.get_tensor(name) for name in ("keys", "tokens", "shares")]
        except SafetensorError as error:
            raise ValueError(f"{file} is not a table of a prior: {error}") from None
        found, tokens, shares = parts
        if not len(found) == len(tokens) == len(shares):
            raise ValueError(f"{file} has columns of different lengths")
        # Arrays of the standard library: reading one number from them costs a third of numpy's.
        self._keys = array("I", found.astype(np.uint32).tobytes())
        self._tokens = array("I", tokens.astype(np.uint32).tobytes())
        self._shares = array("B", shares.astype(np.uint8).tobytes())

    def __len__(self) -> int:
        return len(self._keys)

    def walk(self, context: Sequence[int]) -> PriorWalk:
        return PriorWalk(self, context)

    def guess(self, context: Sequence[int]) -> Guess | None:
        """By the longest context that is known; votes are parts of OF."""
        found = self._keys
        made = _keys(context)
        for length in range(len(made), 0, -1):
            key = made[length - 1]
            index = bisect_left(found, key)
            if index < len(found) and found[index] == key:
                return Guess(self._tokens[index], length, self._shares[index], OF)
        return None


class PriorWalk:
    """See workers.speculators.history.Walk."""

    def __init__(self, prior: Prior, context: Sequence[int]) -> None:
        self._prior = prior
        self._context = list(context[-LONGEST:])

    def guess(self) -> Guess | None:
        return self._prior.guess(self._context)

    def go(self, token: int) -> None:
        self._context = [*self._context[1 - LONGEST :], token]


def _keys(context: Sequence[int]) -> list[int]:
    """Fingerprints of the last token, the last two … of a context: the latest is mixed in first."""
    mixed, made = _START, []
    for token in context[: -LONGEST - 1 : -1]:
        mixed = (mixed ^ token) * _MULTIPLIER & _MASK64
        mixed ^= mixed >> 29
        made.append(mixed >> 32)
    return made
