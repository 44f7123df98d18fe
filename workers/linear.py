"""Linear layers whose rows do not depend on the number of rows, and the proof of it at load.

Owns the choice between ways of multiplying and the row counts at which one may be called. It knows no model.

A library picks its kernel by the shape of the call, and kernels differ in the order of summation. So a layer
is only ever called with a row count out of a fixed list of buckets, and calls with fewer rows are padded up.
Which buckets give the same bits is found out on the machine at hand: `agreeing_rows` compares, `choose`
decides.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

Linear = Callable[["Tensor"], "Tensor"]
"""[rows, in] → [rows, out], in the type of its input."""

MakeLinear = Callable[["Tensor", "Tensor | None"], Linear]
"""Weight [out, in] and bias [out], both in the compute type, to a layer."""

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32, 48, 64)
WIDE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
"""Buckets of layers with very many outputs, where every trial costs milliseconds."""

_ROWS_HINT = 16


class RowBuckets(NamedTuple):
    """Row counts that a layer may be called with, ascending."""

    sizes: tuple[int, ...]

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def fit(self, rows: int) -> int:
        """The smallest bucket that holds so many rows. Raises ValueError if none does."""
        index = bisect_left(self.sizes, rows)
        if index == len(self.sizes):
            raise ValueError(f"{rows} rows exceed the largest bucket, {self.largest}")
        return self.sizes[index]


def every_count(largest: int) -> RowBuckets:
    """No padding at all, where rows may depend on their number."""
    return RowBuckets(tuple(range(1, largest + 1)))


ONE_BY_ONE = RowBuckets((1,))


def compute_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What layers multiply in: a CPU without arithmetic in `dtype` uses float32 on weights rounded to it."""
    if device.type != "cpu":
        return dtype
    if dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return torch.float32


def plain(weight: Tensor, bias: Tensor | None) -> Linear:
    """The library's own product."""
    dtype = weight.dtype

    def call(x: Tensor) -> Tensor:
        return F.linear(x.to(dtype), weight, bias).to(x.dtype)

    return call


def packed(weight: Tensor, bias: Tensor | None) -> Linear:
    """oneDNN's product over a weight reordered once. Raises RuntimeError where there is none for the type."""
    multiply = torch.ops.mkldnn._linear_pointwise.default
    dtype = weight.dtype
    # The hint picks the layout. That for a single row would make single rows differ from all others.
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)

    def call(x: Tensor) -> Tensor:
        y: Tensor = multiply(x.to(dtype), blocks, bias, "none", [], "")
        return y.to(x.dtype)

    return call


def agreeing_rows(linear: Linear, features: int, candidates: Sequence[int]) -> tuple[int, ...]:
    """The largest set of row counts at which `linear` gives a row the same bits, whatever its place.

    Of two sets of one size, that with the larger counts. May be empty: one row has only one place, but more
    than one row can differ by their places. Deterministic. `features` is the width of the input, float32.
    """
    x = torch.randn(max(candidates), features, generator=torch.Generator().manual_seed(0))
    classes: list[tuple[Tensor, list[int]]] = []
    for rows in sorted(candidates, reverse=True):
        # Reversed order, so that agreement with the first of a class also shows that places do not matter.
        turned = linear(x[:rows].flip(0)).flip(0)
        for reference, members in classes:
            if torch.equal(reference[:rows], turned):
                members.append(rows)
                break
        else:
            straight = linear(x[:rows])
            if torch.equal(straight, turned):
                classes.append((straight, [rows]))
    best: list[int] = max((members for _, members in classes), key=len, default=[])
    return tuple(sorted(best))


def choose(
    samples: Iterable[Tensor], candidates: Sequence[int], ways: Sequence[MakeLinear] = (packed, plain)
) -> tuple[MakeLinear, RowBuckets]:
    """The first way to multiply, and its buckets, that is invariant for weights of all these shapes.

    If no way is, every row is computed by a call of its own.
    """
    weights = list({tuple(weight.shape): weight for weight in samples}.values())
    usable: MakeLinear | None = None
    for make in ways:
        try:
            linears = [(make(weight, None), weight.shape[1]) for weight in weights]
            common = set(candidates)
            for linear, features in linears:
                common &= set(agreeing_rows(linear, features, candidates))
        except RuntimeError:
            continue
        usable = usable or make
        if common:
            return make, RowBuckets(tuple(sorted(common)))
    if usable is None:
        raise RuntimeError("no way of multiplying works on this device")
    return usable, ONE_BY_ONE
