"""The proof at load that ranks, each with some of the outputs of every matrix, compute what one rank would.

Nothing that is gathered is rounded again, so all that can differ is a kernel that a library takes for a
narrower matrix, or for fewer heads. That is tried for every shape on the machine at hand, at all row counts
that may occur. What does not agree is not cut: then each rank computes all of it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from workers.engines.native.shards import Shards, uncut
from workers.linear import SMALL, MakeLinear, RowBuckets, agreeing_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.engines.native.weights import Matrix
    from workers.group import Group


class Trial(NamedTuple):
    """A way to multiply, and the row counts that a single rank would use."""

    make: MakeLinear
    rows: RowBuckets


class Proved(NamedTuple):
    """Shards that are exact, and the row counts at which they are: of layers and of the output layer."""

    shards: Shards
    rows: RowBuckets
    head_rows: RowBuckets


def prove(
    group: Group,
    shards: Shards,
    samples: Sequence[Matrix],
    head: Matrix,
    trials: tuple[Trial, Trial],
    *,
    heads_agree: bool,
) -> Proved:
    """`samples`: one layer's matrices; `trials`: for layers and for the output layer; `heads_agree`: whether
    attention over this rank's heads is what it is among all. The answer is the same on all ranks."""
    layers, output = trials
    if not all(group.agree([heads_agree])):
        shards = replace(shards, heads=uncut(shards.heads.size))
    for name, matrix in zip(("heads", "attended", "inner", "down"), samples, strict=True):
        shards, rows = _tried(group, shards, name, matrix, layers)
        layers = Trial(layers.make, rows)
    shards, head_rows = _tried(group, shards, "vocabulary", head, output)
    return Proved(shards, layers.rows, head_rows)


def _tried(
    group: Group, shards: Shards, name: str, matrix: Matrix, trial: Trial
) -> tuple[Shards, RowBuckets]:
    """The shards, uncut in the dimension `name` if too few row counts agree, and those that are left."""
    keep, rows = matrix.keep(shards.rank), trial.rows
    if keep is None or not getattr(shards, name).is_cut:
        return shards, rows
    agreed = group.agree(agreeing_parts(trial.make, matrix.weight, keep, rows.sizes))
    left = tuple(size for size, agrees in zip(rows.sizes, agreed, strict=True) if agrees)
    if left and left[0] <= max(SMALL, rows.sizes[0]):
        return shards, RowBuckets(left)
    whole: dict[str, Any] = {name: uncut(getattr(shards, name).size)}
    return replace(shards, **whole), rows
