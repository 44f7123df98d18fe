"""From a checkpoint to a model that can run: which arithmetic, proved in which shapes, and which rank's part.

Nothing here is kept that the model does not need: weights are read, tried and made one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from workers.attention import PLAIN, blocked, fused
from workers.engines.native.config import read_config
from workers.engines.native.exact import Trial, prove
from workers.engines.native.model import Model
from workers.engines.native.shards import split
from workers.engines.native.together import Together
from workers.engines.native.weights import Checkpoint, Matrix, Types, Weights
from workers.linear import EXACT, NARROW, ROWS, WIDE_ROWS, choose, every_count, narrow, plain
from workers.scratch import Widths
from workers.tiling_proof import part_agrees, prove_tiling

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from workers.attention import Kernel, Tiling
    from workers.engines.native.config import ModelConfig
    from workers.engines.native.shards import Shards
    from workers.group import Group
    from workers.linear import MakeLinear, RowBuckets

_WIDE = 8192
_DEVICE_PASS_TOKENS = 512


class Wanted(NamedTuple):
    """weights: what they are rounded to. exact: whether rows may not depend on what else is computed, nor on
    the number of ranks. `group`: the ranks that share the model, if this is one of several."""

    weights: torch.dtype
    device: torch.device
    exact: bool
    group: Group | None = None


class Attending(NamedTuple):
    """How attention is computed: in which type, by calls of which kernel, cut how."""

    dtype: torch.dtype
    kernel: Kernel
    tiling: Tiling


class LoadedModel(NamedTuple):
    """`config`: of the heads that this rank has. `rows`, `head_rows`: how many rows layers and output layer
    may be called with. `notes`: for the user."""

    model: Model
    config: ModelConfig
    widths: Widths
    attending: Attending
    rows: RowBuckets
    head_rows: RowBuckets
    notes: list[str]


def load(directory: Path, wanted: Wanted) -> LoadedModel:
    """Raises ValueError naming what cannot be served, OSError for an unreadable checkpoint, RankGone."""
    whole = read_config(directory)
    checkpoint = Checkpoint(directory)
    device, group = wanted.device, wanted.group
    on_cpu = device.type == "cpu"
    types = Types(wanted.weights, device)
    rank, ranks = (group.rank, group.size) if group else (0, 1)
    shards = split(whole, rank, ranks, paired=not wanted.exact)

    weights = Weights(checkpoint, whole, types, shards)
    head = Matrix.of(weights.head(), shards.vocabulary)
    samples = weights.samples()
    candidates = WIDE_ROWS if whole.vocab_size > _WIDE else ROWS
    make, rows = _way(wanted, [sample.weight for sample in samples], ROWS)
    make_head, head_rows = _way(wanted, [head.weight], candidates)
    stream = torch.float32 if on_cpu else wanted.weights
    dtype = torch.float32 if on_cpu and make is not narrow else wanted.weights
    attending = _attention(whole, dtype, wanted)
    notes = []
    if wanted.exact and group is not None:
        heads = whole.kv_heads, whole.query_heads, whole.head_dim, attending.dtype, device
        alike = part_agrees(*heads, attending.tiling, shards.heads.of(rank), attending.kernel)
        trial = Trial(make, rows), Trial(make_head, head_rows)
        shards, rows, head_rows = prove(group, shards, samples, head, trial, heads_agree=alike)
        notes.append(_shared(shards))
        weights = Weights(checkpoint, whole, types, shards)
        head = Matrix.of(head.weight, shards.vocabulary)
    del samples
    together = Together(group, shards, whole)
    own = shards.config(whole)
    model = Model(
        own,
        together.embedding(weights.embedding()),
        [together.layer(weights.layer(index, make)) for index in range(whole.layers)],
        weights.final_norm(),
        together.head(make_head(head.weight, None, head.keep(rank))),
        stream,
    )
    checkpoint.check_all_taken()
    widths = _widths(own, shards, stream, dtype, attending)
    return LoadedModel(model, own, widths, attending, rows, head_rows, notes)


def _attention(whole: ModelConfig, dtype: torch.dtype, wanted: Wanted) -> Attending:
    """In the type of the layers if rows come out alike in it, else in float32."""
    device = wanted.device
    may_fuse = device.type == "cpu" and dtype == torch.bfloat16
    if not wanted.exact:
        return Attending(dtype, fused if may_fuse else blocked, PLAIN)
    shape = whole.kv_heads, whole.query_heads, whole.head_dim
    if may_fuse:
        tiling = prove_tiling(*shape, dtype, device, fused, (0,))
        if not tiling.alone:
            return Attending(dtype, fused, tiling)
        dtype = torch.float32
    return Attending(dtype, blocked, prove_tiling(*shape, dtype, device))


def _way(
    wanted: Wanted, samples: Sequence[Tensor], candidates: Sequence[int]
) -> tuple[MakeLinear, RowBuckets]:
    """How to multiply, and with how many rows at once. As of the whole matrices, so alike on all ranks."""
    if wanted.device.type != "cpu":
        return plain, every_count(_DEVICE_PASS_TOKENS)
    make, buckets = choose(samples, candidates, NARROW if wanted.weights == torch.bfloat16 else EXACT)
    return make, buckets if wanted.exact else every_count(candidates[-1])


def _widths(
    own: ModelConfig, shards: Shards, stream: torch.dtype, dtype: torch.dtype, attending: Attending
) -> Widths:
    inner = shards.inner.of(shards.rank)
    return Widths(
        hidden=own.hidden_size,
        inner=inner.stop - inner.start,
        query_heads=own.query_heads,
        rotated=own.query_heads + own.kv_heads,
        kv_heads=own.kv_heads,
        head_dim=own.head_dim,
        head_norm=own.query_key_norm,
        stream=stream,
        dtype=dtype,
        attending=attending.dtype,
        kv_dtype=dtype,
        scores=attending.kernel is not fused,
    )


def _shared(shards: Shards) -> str:
    text = f"native engine: {shards.ranks} ranks, proved to compute what one would"
    uncut = shards.uncut
    return f"{text}; each computes all of {', '.join(uncut)}" if uncut else text
