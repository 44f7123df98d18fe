"""The head as a module to train: the arithmetic of workers.speculators.head, over whole sequences at once.

Step s at index i has seen the features of positions up to i and the tokens up to i + 1 + s; it guesses token
i + 2 + s. Steps after the first see no further features: their input is the head's own last row, as it is
when they draft (training-time test, arXiv 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shape:
    """`window`: how many indices back a row sees, its own included."""

    hidden: int = 576
    query_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    inner: int = 1536
    features: int = 1728
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    window: int = 256


class _Norm(nn.Module):
    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self._eps)


class Head(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, inner = shape.hidden, shape.inner
        self.fuse = nn.Linear(shape.features, width, bias=False)
        self.norm_embed, self.norm_feature, self.norm_mlp, self.norm_out = (
            _Norm(width, shape.norm_eps) for _ in range(4)
        )
        self.q_proj = nn.Linear(2 * width, shape.query_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.query_heads * shape.head_dim, width, bias=False)
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Start from weights of any dtype. Raises RuntimeError if names or shapes differ."""
        self.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})

    def steps(self, features: Tensor, embedded: Iterator[Tensor]) -> Iterator[Tensor]:
        """Rows to multiply with the output rows, [n, length, hidden], one for each of `embedded`.

        features [n, length, 3 · hidden]; embedded: for step s, the embeddings of tokens i + 1 + s for all
        indices i, [n, length, hidden].
        """
        shape = self.shape
        g = self.fuse(features)
        count, length = g.shape[:2]
        index = torch.arange(length, device=g.device)
        distance = index[:, None] - index[None, :]
        hidden = (distance < 0) | (distance >= shape.window)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step, embeddings in enumerate(embedded):
            x = torch.cat((self.norm_embed(embeddings), self.norm_feature(g)), dim=-1)
            table = self._rotations(index + step)
            q = _rotate(self._heads(self.q_proj(x)), table)
            keys.append(_rotate(self._heads(self.k_proj(x)), table))
            values.append(self._heads(self.v_proj(x)))
            grouped = q.reshape(count, shape.kv_heads, -1, length, shape.head_dim)
            scores = (grouped @ keys[0].unsqueeze(2).transpose(-1, -2)).masked_fill(hidden, float("-inf"))
            own = [(grouped * key.unsqueeze(2)).sum(-1, keepdim=True) for key in keys[1:]]
            weights = torch.softmax(torch.cat((scores, *own), dim=-1) * shape.head_dim**-0.5, dim=-1)
            out = weights[..., :length] @ values[0].unsqueeze(2)
            for back, value in enumerate(values[1:]):
                out = out + weights[..., length + back : length + back + 1] * value.unsqueeze(2)
            out = out.reshape(count, -1, length, shape.head_dim).transpose(1, 2).reshape(count, length, -1)
            g = g + self.o_proj(out)
            gate, up = self.gate_up_proj(self.norm_mlp(g)).chunk(2, dim=-1)
            g = g + self.down_proj(F.silu(gate) * up)
            yield self.norm_out(g)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.shape.head_dim).transpose(1, 2)

    def _rotations(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        size = self.shape.head_dim
        exponent = torch.arange(0, size, 2, device=positions.device, dtype=torch.float64) / size
        angle = positions.double()[:, None] * self.shape.rope_theta**-exponent
        return angle.cos().float(), angle.sin().float()


def _rotate(heads: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = table
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
