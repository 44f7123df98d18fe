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
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

T = TypeVar("T", "Tensor", "Tensor | None")

Linear = Callable[["Tensor"], "Tensor"]
"""[rows, in] → [rows, out]. On a CPU it takes float32 and what it returns: float32, bfloat16 by `narrow`."""


class MakeLinear(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None, keep: Tensor | None = None, /) -> Linear:
        """Weight [out, in] and bias [out], as they are stored, to a layer of all outputs or those `keep`."""
        ...


ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
WIDE_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
"""Buckets of layers with very many outputs, where every trial costs milliseconds."""

_ROWS_HINT = 16
_NARROW_ROWS_HINT = 1
_HALF_BITS = 32
SMALL = 4
"""A way to multiply must have a bucket as small as this to be taken, for the sake of one-token steps."""


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


def plain(weight: Tensor, bias: Tensor | None, keep: Tensor | None = None) -> Linear:
    """The library's own product; on a CPU in float32, since few have fast arithmetic in narrower types."""
    weight, bias = _kept(weight, keep), _kept(bias, keep)
    weight = weight.float() if weight.device.type == "cpu" else weight
    bias = None if bias is None else bias.to(weight.dtype)

    def call(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return call


def packed(weight: Tensor, bias: Tensor | None, keep: Tensor | None = None) -> Linear:
    """oneDNN's float32 product over a weight reordered once. Raises RuntimeError where there is none."""
    weight, bias = _kept(weight, keep), _kept(bias, keep)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    # The hint picks the layout. That for a single row would make single rows differ from all others.
    blocks = torch.ops.mkldnn._reorder_linear_weight(weight.float().contiguous(), _ROWS_HINT)
    bias = None if bias is None else bias.float()

    def call(x: Tensor) -> Tensor:
        y: Tensor = multiply(x, blocks, bias, "none", [], "")
        return y

    return call


def half(weight: Tensor, bias: Tensor | None, keep: Tensor | None = None) -> Linear:
    """FBGEMM's float32 product over weights kept in 16 bits, which halves the memory that decoding waits for.

    Exact for float16 and, scaled by a power of two, for bfloat16 within 2^-32 of the largest weight; nothing
    but the storage is narrow. Raises RuntimeError for weights that do not fit, or where there is no FBGEMM.
    """
    wide = weight.float()
    scale = 1.0
    if not torch.equal(wide.half().float(), wide):
        # A largest weight just below 2^15 leaves float16's whole range to the small ones.
        largest = wide.abs().max()
        scale = 2.0 ** (15 - int(torch.frexp(largest).exponent))
        wide = wide * scale
        if not (wide.half().float() - wide).abs().max() <= largest * scale * 2.0**-_HALF_BITS:
            raise RuntimeError("weights do not fit in 16 bits")
    # Only now: a part is scaled as the whole is, or its small weights would be rounded differently.
    wide, bias = _kept(wide, keep), _kept(bias, keep)
    prepacked = torch.ops.quantized.linear_prepack_fp16(wide, None if bias is None else bias.float())
    multiply = torch.ops.quantized.linear_dynamic_fp16

    def call(x: Tensor) -> Tensor:
        y: Tensor = multiply(x if scale == 1.0 else x / scale, prepacked)
        return y

    return call


def narrow(weight: Tensor, bias: Tensor | None, keep: Tensor | None = None) -> Linear:
    """oneDNN's bfloat16 product over a weight reordered once: [rows, in] → bfloat16 [rows, out].

    Sums are float32; inputs are rounded before, and results after. Raises RuntimeError for weights of other
    types, and on CPUs without such arithmetic, where it would be emulated.
    """
    if weight.dtype != torch.bfloat16 or not has_bfloat16():
        raise RuntimeError("no bfloat16 arithmetic, or weights that are not bfloat16")
    multiply = torch.ops.mkldnn._linear_pointwise.default
    # This layout was seen to give the same bits at more row counts than those for several rows.
    blocks = torch.ops.mkldnn._reorder_linear_weight(_kept(weight, keep).contiguous(), _NARROW_ROWS_HINT)
    bias = _kept(bias, keep)

    def call(x: Tensor) -> Tensor:
        y: Tensor = multiply(x.to(torch.bfloat16), blocks, bias, "none", [], "")
        return y

    return call


EXACT: tuple[MakeLinear, ...] = (half, packed, plain)
"""Float32 arithmetic over the weights as they are stored, the fastest first."""
NARROW: tuple[MakeLinear, ...] = (narrow, *EXACT)
"""What a lane of bfloat16 may use."""


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself. A property of the CPU, like all that `choose` goes by."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _kept(tensor: T, keep: Tensor | None) -> T:
    return tensor if tensor is None or keep is None else tensor.index_select(0, keep)


def agreeing_parts(make: MakeLinear, weight: Tensor, keep: Tensor, candidates: Sequence[int]) -> list[bool]:
    """For each row count, whether a layer of only the outputs `keep` gives the bits of the whole one."""
    weight, x = _tried(make, weight, max(candidates))
    whole, part = make(weight, None), make(weight, None, keep)
    return [torch.equal(whole(x[:rows]).index_select(1, keep), part(x[:rows])) for rows in candidates]


def agreeing_rows(
    linear: Linear, features: int, candidates: Sequence[int], x: Tensor | None = None
) -> tuple[int, ...]:
    """The largest set of row counts at which `linear` gives a row the same bits, whatever its place.

    Of two sets of one size, that with the larger counts. May be empty: one row has only one place, but more
    than one row can differ by their places. Deterministic. `features` is the width of the input; `x`: inputs
    to try, float32 [at least the largest count, features].
    """
    if x is None:
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
    samples: Iterable[Tensor], candidates: Sequence[int], ways: Sequence[MakeLinear] = EXACT
) -> tuple[MakeLinear, RowBuckets]:
    """The first way to multiply, and its buckets, that is invariant for weights of all these shapes.

    If no way is, every row is computed by a call of its own. The choice follows from the machine alone and
    not from timing, so that a lane that is started again computes the same numbers.
    """
    weights = list({tuple(weight.shape): weight for weight in samples}.values())
    usable: list[tuple[MakeLinear, RowBuckets]] = []
    for make in ways:
        try:
            common = _common_rows(make, weights, candidates)
        except (RuntimeError, AttributeError):
            # Not in this build of torch, or not for this CPU or these weights.
            continue
        usable.append((make, RowBuckets(common) if common else ONE_BY_ONE))
        if common and common[0] <= SMALL:
            return usable[-1]
    if not usable:
        raise RuntimeError("no way of multiplying works on this device")
    return next((way for way in usable if way[1] != ONE_BY_ONE), usable[0])


def _common_rows(make: MakeLinear, weights: Sequence[Tensor], candidates: Sequence[int]) -> tuple[int, ...]:
    common = set(candidates)
    for weight in weights:
        tried, x = _tried(make, weight, max(candidates))
        common &= set(agreeing_rows(make(tried, None), tried.shape[1], candidates, x))
    return tuple(sorted(common))


def _tried(make: MakeLinear, weight: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """What a way to multiply is tried with: a weight of this shape, and inputs [rows, in]."""
    outputs, features = weight.shape
    if make is narrow:
        # Rounding to bfloat16 would hide most differences between two orders of summation.
        return revealing(outputs, features, rows, weight.dtype)
    return weight, torch.randn(rows, features, generator=torch.Generator().manual_seed(0))


def revealing(outputs: int, features: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight [outputs, features] and inputs [rows, features] whose exact product is zero.

    Every term has its opposite somewhere else in the sum, and terms differ in size, so a result is nothing
    but rounding errors: another order of summation is another result, in its leading bits.
    """
    generator = torch.Generator().manual_seed(0)

    def terms(count: int) -> Tensor:
        size = (count, features // 2)
        spread = torch.exp2(4 * torch.randn(size, generator=generator))
        return (torch.randn(size, generator=generator) * spread).to(dtype)

    order = torch.randperm(features // 2 * 2, generator=generator)
    weight, x = torch.zeros(outputs, features, dtype=dtype), torch.zeros(rows, features)
    some = terms(outputs)
    weight[:, order] = torch.cat((some, -some), dim=1)
    x[:, order] = terms(rows).float().repeat(1, 2)
    return weight, x
