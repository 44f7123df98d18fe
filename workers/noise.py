"""Counter-based noise: a uniform number per (seed, position, purpose, token id), with no state between calls.

The key of a row is BLAKE2b over seed, position and purpose; a token's 32-bit word is an odd multiple of its
id plus an offset, both from the key, put through the finaliser lowbias32 (C. Wellons, "Prospecting for Hash
Functions"). This file is the definition, in pure Python; `workers.sampler` computes the same words on
tensors. It must not import torch, and knows nothing of logits or sampling parameters.
"""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import NamedTuple

TARGET = 0
"""Purpose of the noise that picks a sequence's tokens. Any other use takes a purpose of its own, so that no
two decisions about one position share their randomness."""
DRAFT, ACCEPT, RECOVER = 1, 2, 3
"""Purposes in rejection sampling: which token is guessed, whether it stands, what takes its place."""

MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
LARGEST_UNIFORM = 1.0 - 2.0**-24
"""The largest number below 1 in float32: log1p of its negative is finite there."""

_DEPTH_SHIFT = 8
_FIELDS = struct.Struct("<QQI")
_WORDS = struct.Struct("<II")
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF


class Key(NamedTuple):
    """Noise of one row: token id t has the word of (t * multiplier + offset) mod 2**32; multiplier is odd."""

    multiplier: int
    offset: int


def key(seed: int, position: int, purpose: int = TARGET) -> Key:
    """Key of the row that samples the token at `position` (0 … 2**64 - 1). Seeds count modulo 2**64."""
    fields = _FIELDS.pack(seed & _MASK64, position, purpose)
    offset, multiplier = _WORDS.unpack(blake2b(fields, digest_size=8, person=b"speclane").digest())
    return Key(multiplier | 1, offset)


def word(row: Key, token: int) -> int:
    """The 32-bit word of a token id, 0 … 2**32 - 1; over all ids of a row a permutation."""
    x = (token * row.multiplier + row.offset) & _MASK32
    x ^= x >> 16
    x = x * MULTIPLIER_1 & _MASK32
    x ^= x >> 15
    x = x * MULTIPLIER_2 & _MASK32
    return x ^ x >> 16


def uniform(row: Key, token: int) -> float:
    """A number in (0, 1), at most 1 - 2**-24."""
    return min((word(row, token) + 0.5) * 2.0**-32, LARGEST_UNIFORM)


def gumbel(row: Key, token: int) -> float:
    """Standard Gumbel noise -log(E), where E = -log1p(-v) is exponential and v is `uniform`.

    Small v, which make large noise, keep their full precision that way; the largest value is about 22.9.
    """
    return -math.log(-math.log1p(-uniform(row, token)))


def fraction(seed: int, position: int, purpose: int, depth: int) -> float:
    """A number in [0, 1) with 53 random bits, for a decision over the token at `position`, the one with index
    `depth` in its draft.

    Depth and position say where the draft began. A draft that did not stand may have been judged by what
    followed, so the one that begins later at the same positions must not see the same noise; and one that is
    judged again, since its verdict was lost, must.
    """
    row = key(seed, position, purpose | depth << _DEPTH_SHIFT)
    return ((word(row, 0) >> 5) * 2.0**26 + (word(row, 1) >> 6)) * 2.0**-53
