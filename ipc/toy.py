"""The parameters of a toy model, as the executor checks them and the worker becomes what they say. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class ToyParameters:
    """A toy, written as `name=value` pairs with commas between them; what is left out has the default here.

    vocabulary: number of token ids, at least 2.
    agree: share of contexts, 0 … 1, in which this toy's distribution is that of the toy with agree=1 and
        the same seed, vocabulary and order; in the others it is an unrelated one.
    near: share of those others, 0 … 1, in which it is that distribution but for one token that this toy
        prefers: then what is likeliest there comes second here.
    seed: another seed is another model.
    order: number of last tokens that the next one hangs on, at least 1.
    context: longest sequence in tokens, at least 2.
    step_ms, row_us: time that a forward pass takes: step_ms, plus row_us for each row of logits.
    """

    vocabulary: int = 256
    agree: float = 1.0
    near: float = 0.0
    seed: int = 0
    order: int = 3
    context: int = 4096
    step_ms: float = 0.0
    row_us: float = 0.0

    @classmethod
    def parse(cls, text: str) -> ToyParameters:
        """Raises ValueError naming the parameter and what it may be."""
        defaults: dict[str, Any] = {field.name: field.default for field in fields(cls)}
        values: dict[str, Any] = {}
        for pair in filter(None, (part.strip() for part in text.split(","))):
            name, _, value = (part.strip() for part in pair.partition("="))
            if name not in defaults:
                raise ValueError(f"a toy has no parameter {name!r}, only {', '.join(defaults)}")
            if name in values:
                raise ValueError(f"toy parameter {name} is given twice")
            values[name] = _number(name, value, defaults[name])
        return cls(**values)

    def __str__(self) -> str:
        """What `parse` reads, without defaults, but always with the vocabulary."""
        pairs = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return ",".join(
            f"{name}={value}" for name, value, default in pairs if value != default or name == "vocabulary"
        )


_LOWEST = {"vocabulary": 2, "order": 1, "context": 2}
_HIGHEST = {"vocabulary": 1 << 31, "agree": 1, "near": 1, "seed": _MASK64}


def _number(name: str, text: str, default: float) -> float:
    low, high = _LOWEST.get(name, 0), _HIGHEST.get(name, math.inf)
    noun = "a whole number" if isinstance(default, int) else "a number"
    bounds = f"of at least {low}" if high == math.inf else f"from {low} to {high}"
    refusal = f"toy parameter {name} must be {noun} {bounds}, got {text!r}"
    try:
        value = type(default)(text)
    except ValueError:
        raise ValueError(refusal) from None
    if not low <= value <= high or value == math.inf:
        raise ValueError(refusal)
    return value
