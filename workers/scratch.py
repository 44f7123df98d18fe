"""The named views that one forward pass works in, out of a lane's workspace; `NONE` of them means: allocate.

Operations with an `out` take these. What has none, such as a packed linear layer, still allocates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from workers.workspace import Spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from workers.workspace import Workspace


class Widths(NamedTuple):
    """Of a model, per row: hidden and inner features, query heads, those that are rotated, and their size.

    `head_norm`: whether heads have norms of their own. `stream`: the type of the rows that layers add to;
    `dtype`: of what linear layers return; `attending`: of attention's arithmetic; `kv_dtype`: of stored keys.
    `scores`: whether attention wants storage for them.
    """

    hidden: int
    inner: int
    query_heads: int
    rotated: int
    kv_heads: int
    head_dim: int
    head_norm: bool
    stream: torch.dtype
    dtype: torch.dtype
    attending: torch.dtype
    kv_dtype: torch.dtype
    scores: bool


class Need(NamedTuple):
    """Of a pass: its rows, padding included, and attended rows of heads; of its largest group, rows of heads,
    blocks of keys or values of a head, and elements of the scores."""

    rows: int
    outputs: int
    queries: int
    pieces: int
    scores: int


class Layers(NamedTuple):
    """What the layers write to; see workers.engines.native.model."""

    x: Tensor | None = None
    normed: Tensor | None = None
    scale: Tensor | None = None
    normed_heads: Tensor | None = None
    head_scale: Tensor | None = None
    products: Tensor | None = None
    gated: Tensor | None = None


class Attending(NamedTuple):
    """What attention writes to, all flat but the rows of heads; see workers.attention."""

    outputs: Tensor | None = None
    attended: Tensor | None = None
    queries: Tensor | None = None
    gathered: Tensor | None = None
    widened: Tensor | None = None
    scores: Tensor | None = None
    weights: Tensor | None = None


class Scratch(NamedTuple):
    layers: Layers = Layers()
    attending: Attending = Attending()


NONE = Scratch()


def specs(widths: Widths, need: Need, block: int) -> list[Spec | None]:
    """In the order of the fields of Layers and Attending; None: not needed."""
    import torch

    dtype, wide, rows = widths.attending, torch.float32, need.rows
    rotated, head_dim = widths.rotated, widths.head_dim
    heads = widths.head_norm
    return [
        Spec((rows, widths.hidden), widths.stream),
        Spec((rows, widths.hidden), wide),
        Spec((rows, 1), wide),
        Spec((rows, rotated, head_dim), wide) if heads else None,
        Spec((rows, rotated, 1), wide) if heads else None,
        Spec((rows, rotated, 2, 2, head_dim // 2), wide),
        Spec((rows, widths.inner), widths.dtype),
        Spec((need.outputs, head_dim), dtype),
        Spec((rows * widths.query_heads, head_dim), dtype),
        Spec((need.queries, head_dim), dtype),
        Spec((need.pieces, block * head_dim), widths.kv_dtype),
        Spec((need.pieces, block * head_dim), dtype) if widths.kv_dtype != dtype else None,
        Spec((need.scores,), dtype) if widths.scores else None,
        Spec((need.scores,), dtype) if widths.scores else None,
    ]


def take(workspace: Workspace[Tensor], ubatch: int, widths: Widths, need: Need, block: int) -> Scratch:
    """For one pass of this ubatch. Raises WorkspaceLocked if it needs more than any that was planned."""
    wanted = specs(widths, need, block)
    views = iter(workspace.take(ubatch, "forward pass", *(spec for spec in wanted if spec is not None)))
    given = [None if spec is None else next(views) for spec in wanted]
    layers = len(Layers._fields)
    return Scratch(Layers(*given[:layers]), Attending(*given[layers:]))
