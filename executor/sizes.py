"""Bytes as people write them."""

from __future__ import annotations

import math
import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_size(text: str) -> int:
    """`4GB`, `512MiB`, `1.5g` or plain bytes. Raises ValueError for what is no size."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{text!r} is no size; try 4GB or 512MiB")
    return int(float(found[1]) * (_BINARY if found[3] else _UNITS)[found[2]])


def size(nbytes: int) -> str:
    """Three digits, rounded up, so that what is said to suffice does; `parse_size` reads it."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            digits = max(0, 2 - int(math.log10(nbytes / scale)))
            rounded = math.ceil(nbytes / scale * 10**digits) / 10**digits
            return f"{rounded:.{digits}f}{unit}"
    return f"{nbytes}B"
