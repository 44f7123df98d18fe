"""Which rank of a lane has which part of a model. Pure: names of dimensions and numbers only.

Two schemes. In the exact one all matrices are cut by their outputs, and a rank computes whole dot products:
each number of the result is one that a single rank computes in the same way, so nothing changes if the
library's kernels do not (workers.engines.native.exact tries that). Parts are gathered four times a layer. In
the paired one, usual on GPUs, the second matrix of attention and of the network is cut by its inputs, and
ranks add up: half as many exchanges, but sums in another order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from workers.engines.native.config import ModelConfig

UNIT = 64
"""Features are cut at multiples of this, the width of no vector instruction: what operates on parts of rows
then begins and ends where it would in a whole row."""


class Cut(NamedTuple):
    """Rank r has `widths[r]` of a dimension, those after the parts of the ranks before it.

    Uncut: all ranks have, and compute, all of it.
    """

    size: int
    widths: tuple[int, ...]

    @property
    def is_cut(self) -> bool:
        return bool(self.widths)

    def of(self, rank: int) -> slice:
        if not self.widths:
            return slice(0, self.size)
        first = sum(self.widths[:rank])
        return slice(first, first + self.widths[rank])

    def times(self, factor: int) -> Cut:
        """The same cut of so many times as many."""
        return Cut(self.size * factor, tuple(width * factor for width in self.widths))


def uncut(size: int) -> Cut:
    return Cut(size, ())


def cut(size: int, ranks: int, unit: int = UNIT) -> Cut:
    """As evenly as whole units allow, the first ranks having more; uncut if there are not enough for all."""
    units = -(-size // unit)
    if ranks == 1 or units < ranks:
        return uncut(size)
    each, more = divmod(units, ranks)
    ends = [unit * (each * rank + min(rank, more)) for rank in range(1, ranks)]
    return Cut(size, tuple(end - start for start, end in zip((0, *ends), (*ends, size), strict=True)))


@dataclass(frozen=True, slots=True)
class Shards:
    """A model's dimensions, cut.

    heads: of keys and values, with the queries that belong to them. attended, down: outputs of attention's
    second matrix and of the network's, and of none if `paired`: then their inputs are cut, as what makes them
    is. inner: of the network. hidden: of the embedding. vocabulary: of the output layer.
    """

    rank: int
    ranks: int
    paired: bool
    heads: Cut
    attended: Cut
    inner: Cut
    down: Cut
    hidden: Cut
    vocabulary: Cut

    @property
    def uncut(self) -> list[str]:
        """What every rank computes all of, in words."""
        parts = {
            "attention": self.heads,
            "its output": self.attended,
            "the network": self.inner,
            "its output layer": self.down,
            "the vocabulary": self.vocabulary,
        }
        return [name for name, part in parts.items() if not part.is_cut]

    def config(self, whole: ModelConfig) -> ModelConfig:
        """Of the heads that this rank computes."""
        own = self.heads.of(self.rank)
        kv_heads = own.stop - own.start
        queries = kv_heads * (whole.query_heads // whole.kv_heads)
        return replace(whole, query_heads=queries, kv_heads=kv_heads)


def whole(config: ModelConfig) -> Shards:
    """Of a lane of one rank."""
    return split(config, 0, 1, paired=False)


def split(config: ModelConfig, rank: int, ranks: int, *, paired: bool) -> Shards:
    """Raises ValueError if there are more ranks than heads of keys and values, or features for all."""
    if ranks > config.kv_heads:
        raise ValueError(
            f"{ranks} ranks cannot share {config.kv_heads} heads of keys and values; try {config.kv_heads}"
        )
    hidden, inner = cut(config.hidden_size, ranks), cut(config.intermediate_size, ranks)
    if paired:
        inner = cut(config.intermediate_size, ranks, 1)
    return Shards(
        rank=rank,
        ranks=ranks,
        paired=paired and ranks > 1,
        heads=cut(config.kv_heads, ranks, 1),
        attended=uncut(config.hidden_size) if paired else hidden,
        inner=inner,
        down=uncut(config.hidden_size) if paired else hidden,
        hidden=hidden,
        vocabulary=cut(config.vocab_size, ranks),
    )
