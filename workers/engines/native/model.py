"""The forward pass of the Llama family, over rows of tokens of any sequences.

Owns the order of operations and their exactness: every operation here gives a row the same bits whatever rows
stand beside it. It knows neither sequences nor windows; `workers.attention` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from workers.scratch import Layers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from workers.engines.native.config import ModelConfig
    from workers.engines.native.weights import Layer, Norm
    from workers.linear import Linear

_SERIAL_ELEMENTS = 32767
"""Element-wise operations on more elements are cut between threads, at places that depend on their number."""


FRESH = Layers()
S = TypeVar("S", contravariant=True)


class Attention(Protocol[S]):
    """What the layers call; `S` is what one forward pass hands to all of them."""

    def attend(self, layer: int, qkv: Tensor, step: S, scale: float) -> Tensor:
        """Store keys and values of rows [n, query_heads + 2 · kv_heads, head_dim], attend: [n, hidden]."""
        ...


def rms_norm(x: Tensor, norm: Norm, out: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """x / √(mean(x²) + ε) · weight over the last dimension (arXiv 1910.07467), computed in float32.

    Both sides of the fraction are taken times √n, which saves an operation. `out` and `scale` are float32
    storage to work in, of the shape of x, and of x with one feature.
    """
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32, out=scale)
    scale.mul_(scale).add_(norm.epsilon).rsqrt_()
    y = torch.mul(x, scale, out=out).mul_(norm.weight)
    return y if y.dtype == x.dtype else y.to(x.dtype)


def rotations(positions: npt.NDArray[np.int64], inverse_frequencies: npt.NDArray[np.float32]) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) as products: float32 [rows, 1, 2, 2, head_dim / 2].

    The third dimension is the half of a head that is read, the fourth the half that is written. Angles are
    float32 as in the reference implementations; sines and cosines of them are correctly rounded.
    """
    angle = (positions.astype(np.float32)[:, None] * inverse_frequencies).astype(np.float64)
    cos, sin = np.cos(angle), np.sin(angle)
    table = np.stack((cos, sin, -sin, cos), axis=1).astype(np.float32)
    return torch.from_numpy(table).view(len(positions), 1, 2, 2, len(inverse_frequencies))


def rotate(heads: Tensor, table: Tensor, products: Tensor | None = None) -> None:
    """Turn heads [rows, heads, head_dim] in place. Each product and sum is rounded alone, so always alike."""
    rows, count, head_dim = heads.shape
    products = torch.mul(heads.view(rows, count, 2, 1, head_dim // 2), table, out=products)
    torch.add(products[:, :, 0], products[:, :, 1], out=heads.view(rows, count, 2, head_dim // 2))


def gated(gate_up: Tensor, out: Tensor | None = None) -> Tensor:
    """silu(gate) · up of [rows, 2 · n] → [rows, n]; overwrites the gate."""
    features = gate_up.shape[1] // 2
    gate = gate_up[:, :features]
    # The last elements of a thread's share take a scalar exponential that differs from the vector one.
    rows = max(1, _SERIAL_ELEMENTS // features)
    for part in (gate,) if len(gate) <= rows else torch.split(gate, rows):
        F.silu(part, inplace=True)
    return torch.mul(gate, gate_up[:, features:], out=out)


class Model:
    """Weights put in order. `dtype`: of the rows that layers add to; linear layers return their own type.

    Of a rank that has some of the heads, `config` is that of these; `embedding` [n] → [n, hidden] and the
    layers give whole rows nevertheless (see `workers.engines.native.together`).
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Callable[[Tensor], Tensor],
        layers: Sequence[Layer],
        norm: Norm,
        head: Linear,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._dtype = dtype
        self._scale = config.head_dim**-0.5
        self.depth = len(layers)
        """Only so many layers are run; all take the same memory."""

    def hidden(
        self,
        ids: Tensor,
        positions: npt.NDArray[np.int64],
        attention: Attention[S],
        step: S,
        taps: dict[int, Tensor] | None = None,
        scratch: Layers = FRESH,
    ) -> Tensor:
        """Rows [n, hidden] before the last norm, of tokens `ids` [n] at `positions` [n]; stores their KV.

        They stand in `scratch`, if that is given, until the next pass. `taps` is filled with the rows after
        so many layers, for the numbers that are its keys.
        """
        table = rotations(positions, self._config.inverse_frequencies).to(ids.device)
        return self.run(ids, table, attention, step, taps, scratch)

    def run(
        self,
        ids: Tensor,
        table: Tensor,
        attention: Attention[S],
        step: S,
        taps: dict[int, Tensor] | None = None,
        scratch: Layers = FRESH,
    ) -> Tensor:
        """The same with the rotations of the positions, so that nothing comes from outside the device."""
        config = self._config
        rotated = config.query_heads + config.kv_heads
        x = self._embed(ids, scratch.x)
        norm_room = scratch.normed, scratch.scale
        for index, layer in enumerate(self._layers[: self.depth]):
            qkv = layer.qkv(rms_norm(x, layer.input_norm, *norm_room)).view(len(ids), -1, config.head_dim)
            heads = qkv[:, :rotated]
            if layer.head_norm is not None:
                heads.copy_(rms_norm(heads, layer.head_norm, scratch.normed_heads, scratch.head_scale))
            rotate(heads, table, scratch.products)
            x = x.add_(layer.attention_output(attention.attend(index, qkv, step, self._scale)))
            gate_up = layer.gate_up(rms_norm(x, layer.post_norm, *norm_room))
            x = x.add_(layer.down(gated(gate_up, scratch.gated)))
            if taps is not None and index + 1 in taps:
                taps[index + 1] = x.clone()
        return x

    def _embed(self, ids: Tensor, out: Tensor | None) -> Tensor:
        rows = self._embedding(ids)
        return rows.to(self._dtype) if out is None else out.copy_(rows)

    def normed(self, hidden: Tensor) -> Tensor:
        """The last norm of hidden rows."""
        return rms_norm(hidden, self._norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden rows [n, hidden] → float32 [n, vocabulary]; none on a rank that is not the first."""
        return self._head(rms_norm(hidden, self._norm)).float()
