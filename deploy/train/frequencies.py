"""A table of what a model writes, for lookups: short contexts and what mostly followed them.

Of each context the most frequent next token is kept, with its share. A longer context is left out where it
says what the next shorter one says anyway, with about the same share.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workers.speculators.prior import LONGEST, OF, keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

MOST_BYTES = 4 << 20
_ROW_BYTES = 9


class Table(NamedTuple):
    """Columns of workers.speculators.prior, ascending by key."""

    keys: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.uint32]
    shares: npt.NDArray[np.uint8]


def tabulate(texts: Sequence[npt.NDArray[np.int64]]) -> Table:
    """The largest table within MOST_BYTES: of contexts met once, or twice, and so on. `texts`: token ids."""
    for least in itertools.count(1):
        table = _table(texts, least)
        if len(table.keys) * _ROW_BYTES <= MOST_BYTES:
            break
    return table


def _table(texts: Sequence[npt.NDArray[np.int64]], least: int) -> Table:
    """Of contexts that were met at least so often."""
    known: dict[tuple[int, ...], tuple[int, int]] = {}
    for length in range(1, LONGEST + 1):
        windows = [
            np.lib.stride_tricks.sliding_window_view(text, length + 1) for text in texts if len(text) > length
        ]
        grams, counts = np.unique(np.concatenate(windows), axis=0, return_counts=True)
        for context, token, share in _best(grams, counts, least):
            shorter = known.get(context[1:])
            if shorter is None or shorter[0] != token or abs(shorter[1] - share) > OF // 4:
                known[context] = token, share
    return _columns(known)


def _best(
    grams: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], least: int
) -> Sequence[tuple[tuple[int, ...], int, int]]:
    """Context, most frequent next token, its share; grams are sorted, so contexts stand together."""
    starts = np.flatnonzero(np.any(np.diff(grams[:, :-1], axis=0, prepend=-1) != 0, axis=1))
    totals = np.add.reduceat(counts, starts)
    found = []
    for start, end, total in zip(starts, [*starts[1:], len(grams)], totals, strict=True):
        if total >= least:
            best = start + int(counts[start:end].argmax())
            # What was met once is not sure to go on as it did: a doubt is counted in.
            share = round(OF * counts[best] / (total + 0.5))
            found.append((tuple(grams[start, :-1].tolist()), int(grams[best, -1]), share))
    return found


def _columns(known: dict[tuple[int, ...], tuple[int, int]]) -> Table:
    rows: dict[int, tuple[int, int]] = {}
    for length in range(1, LONGEST + 1):
        contexts = [context for context in known if len(context) == length]
        if contexts:
            for key, context in zip(keys(np.array(contexts)).tolist(), contexts, strict=True):
                rows[key] = known[context]  # of contexts that share a fingerprint, which is rare, the last
    ordered = sorted(rows)
    tokens, shares = zip(*(rows[key] for key in ordered), strict=True)
    return Table(np.array(ordered, np.uint32), np.array(tokens, np.uint32), np.array(shares, np.uint8))
