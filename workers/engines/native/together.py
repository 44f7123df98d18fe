"""Layers of which each rank has a part: what it takes to make them look whole to the forward pass.

Owns where ranks exchange what; `workers.engines.native.shards` says who has what, `workers.group` carries it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from workers.engines.native.config import ModelConfig
    from workers.engines.native.shards import Cut, Shards
    from workers.engines.native.weights import Layer
    from workers.group import Group
    from workers.linear import Linear


class Together:
    """The exchanges of one rank. With `group` None there are none: all is whole already."""

    def __init__(self, group: Group | None, shards: Shards, config: ModelConfig) -> None:
        """`config`: of the whole model."""
        self._group = group
        self._shards = shards
        width = config.head_dim * (config.query_heads // config.kv_heads)
        self._attention = shards.heads.times(width)

    def embedding(self, weight: Tensor) -> Callable[[Tensor], Tensor]:
        """Rows [n, hidden] of ids [n], of a part [vocabulary, own features] of all rows."""

        def part(ids: Tensor) -> Tensor:
            return F.embedding(ids, weight)

        return self._gathered(part, self._shards.hidden)

    def layer(self, layer: Layer) -> Layer:
        shards = self._shards
        return replace(
            layer,
            attention_output=self._second(layer.attention_output, self._attention, shards.attended),
            down=self._second(layer.down, shards.inner, shards.down),
        )

    def head(self, linear: Linear) -> Linear:
        """Logits of the whole vocabulary on the first rank, which alone samples; no rows on the others."""
        group, widths = self._group, self._shards.vocabulary.widths
        if group is None:
            return linear
        if not widths:
            return linear if group.rank == 0 else _nothing(self._shards.vocabulary.size)

        def call(x: Tensor) -> Tensor:
            return group.to_first(linear(x), widths)

        return call

    def _second(self, linear: Linear, inputs: Cut, outputs: Cut) -> Linear:
        """A layer that reads what the ranks computed apart."""
        group = self._group
        if group is None:
            return linear
        if not self._shards.paired:
            return self._gathered(self._reading(linear, inputs), outputs)
        if not inputs.is_cut:
            return linear

        def call(x: Tensor) -> Tensor:
            return group.add(linear(x))

        return call

    def _reading(self, linear: Linear, inputs: Cut) -> Linear:
        group = self._group
        if group is None or not inputs.is_cut:
            return linear

        def call(x: Tensor) -> Tensor:
            return linear(group.gather(x, inputs.widths))

        return call

    def _gathered(self, part: Callable[[Tensor], Tensor], cut: Cut) -> Callable[[Tensor], Tensor]:
        group = self._group
        if group is None or not cut.is_cut:
            return part

        def call(x: Tensor) -> Tensor:
            return group.gather(part(x), cut.widths)

        return call


def _nothing(features: int) -> Linear:
    def call(x: Tensor) -> Tensor:
        return torch.empty((0, features), dtype=x.dtype, device=x.device)

    return call
