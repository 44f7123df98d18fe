"""What draft tokens were drawn from, as it crosses the wire: how it is packed, its bounds, what it may be.

Numbers are little-endian, as on every machine that this runs on. Pure; knows neither models nor sockets.
"""

from __future__ import annotations

import math
import sys
from array import array
from typing import TYPE_CHECKING

from ipc.messages import QRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ipc.messages import QForm

SPARSE_TOKENS = 64
"""A sparse row has the likeliest tokens, so many at most."""
MESSAGE_BYTES = 8 << 20
"""Of rows in one message, which is half of what a frame may have."""
ALL = 0
"""A width: every token of the vocabulary."""
LOOKED_UP = QRow(b"", b"")
ARENA_ROW_BYTES = 64 << 10
"""From this size on a row is worth an arena."""
_ENTRY_BYTES = 8
_WEIGHT_BYTES = 4

assert array("I").itemsize == array("f").itemsize == _WEIGHT_BYTES, "this platform's numbers have other sizes"
assert sys.byteorder == "little", "this platform's numbers are the other way round"


def row_bytes(vocabulary_size: int) -> int:
    """Size of a full row."""
    return vocabulary_size * _WEIGHT_BYTES


def width(form: QForm, count: int, vocabulary_size: int, *, arena: bool = False) -> int:
    """How many tokens each of `count` rows of a message may have; ALL where full rows are wanted and fit, or
    have an `arena`.

    It must not hang on what was drawn: whoever picks a row by its token changes how the text is distributed.
    """
    if form == "full" and (arena or count * row_bytes(vocabulary_size) <= MESSAGE_BYTES):
        return ALL
    return max(1, min(SPARSE_TOKENS, MESSAGE_BYTES // (_ENTRY_BYTES * max(1, count))))


def pack(tokens: Iterable[int] | None, weights: Iterable[float]) -> QRow:
    """A row of these tokens and weights; tokens None: the weights are those of the whole vocabulary."""
    return QRow(b"" if tokens is None else array("I", tokens).tobytes(), array("f", weights).tobytes())


def unpack(row: QRow) -> tuple[array[int] | None, array[float]]:
    """Tokens and weights of a row that was drawn from. Raises ValueError if it has no whole numbers."""
    tokens, weights = array("I"), array("f")
    tokens.frombytes(row.tokens)
    weights.frombytes(row.weights)
    return tokens or None, weights


def fault(row: QRow, token: int, vocabulary_size: int) -> str:
    """Why `token` cannot have been drawn from this row; empty if it can. What an arena holds is not seen."""
    if row == LOOKED_UP:
        return ""
    if row.at is not None:
        whole = ("fp32", (vocabulary_size,), b"", b"")
        return "" if (row.at.dtype, row.at.shape, row.tokens, row.weights) == whole else "its place is none"
    if len(row.tokens) % _WEIGHT_BYTES or len(row.weights) % _WEIGHT_BYTES:
        return "it has no whole numbers"
    tokens, weights = unpack(row)
    if len(weights) != (vocabulary_size if tokens is None else len(tokens)):
        return f"it has {len(weights)} weights of {vocabulary_size if tokens is None else len(tokens)} tokens"
    if not math.isfinite(sum(weights)) or min(weights) < 0.0:
        return "its weights are no probabilities"
    if tokens is None:
        return "" if weights[token] > 0.0 else f"token {token} has no weight in it"
    if max(tokens) >= vocabulary_size or len(set(tokens)) != len(tokens):
        return "its tokens are unknown, or named twice"
    if token not in tokens or weights[tokens.index(token)] <= 0.0:
        return f"token {token} has no weight in it"
    return ""
