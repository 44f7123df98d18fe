"""The target as a teacher: it writes and reads text, and every position leaves a lesson behind.

All rows of a batch stand at the same position: a row that is still being told its prompt is forced, the
others sample. So there is no padding, and a token that is written costs no second pass to learn from.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from workers.engines.native.config import read_config
from workers.engines.native.model import Model
from workers.engines.native.weights import Checkpoint, Types, Weights
from workers.linear import plain

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dialogue import Dialogue
    from torch import Tensor

    from workers.engines.native.config import ModelConfig
    from workers.linear import Linear

TOP = 16
"""So many of the target's most probable tokens are kept per position."""
_BLOCK = 256


class Lessons(NamedTuple):
    """What a batch of `n` rows of `length` tokens teaches; position t's `top` is about token t + 1.

    tokens: int32 [n, length]. written: bool [n, length], sampled by the target rather than given.
    features: bfloat16 [n, length, 3 · hidden], or [n, length, 0] of a teacher that keeps none.
    top_tokens: int32, top_logprobs: float16 [n, length, TOP].
    """

    tokens: Tensor
    written: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class _Cache:
    """Keys and values of rows that all have the same length; see workers.engines.native.model.Attention."""

    def __init__(self, config: ModelConfig, rows: int, length: int, dtype: torch.dtype, device: str) -> None:
        layers, kv_heads, head_dim = config.layers, config.kv_heads, config.head_dim
        shape = (rows, kv_heads, length, head_dim)
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._rows, self._kv_heads, self._head_dim = rows, kv_heads, head_dim

    def attend(self, layer: int, qkv: Tensor, step: tuple[int, int], scale: float) -> Tensor:
        """qkv [rows · count, heads, head_dim] of `count` positions from `start` on; step = (start, count).

        Several positions at once may only be the first ones.
        """
        start, count = step
        heads = qkv.view(self._rows, count, -1, self._head_dim).transpose(1, 2).to(self._keys[0].dtype)
        queries = heads[:, : -2 * self._kv_heads]
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, start : start + count] = heads[:, -2 * self._kv_heads : -self._kv_heads]
        values[:, :, start : start + count] = heads[:, -self._kv_heads :]
        keys, values = keys[:, :, : start + count], values[:, :, : start + count]
        out = F.scaled_dot_product_attention(
            queries, keys, values, is_causal=count > 1, scale=scale, enable_gqa=True
        )
        return out.transpose(1, 2).reshape(self._rows * count, -1).to(qkv.dtype)


class Teacher:
    """`taps`: after how many layers a feature row's first parts are taken; the last is the final norm.

    None: no features are kept; then products and attention are in bfloat16 where the CPU has that."""

    def __init__(self, directory: Path, taps: tuple[int, int] | None, device: str = "cpu") -> None:
        """Raises OSError or ValueError if there is no checkpoint that the native engine can serve."""
        self.config = read_config(directory)
        self.device = device
        self._taps = taps
        on_cpu = device == "cpu"
        narrow = not on_cpu or (taps is None and torch.ops.mkldnn._is_mkldnn_bf16_supported())
        self._cached = torch.bfloat16 if narrow else torch.float32
        make = _narrow if narrow and on_cpu else plain
        dtype = torch.float32 if on_cpu else torch.bfloat16
        checkpoint = Checkpoint(directory)
        weights = Weights(checkpoint, self.config, Types(dtype, torch.device(device)))
        self.embedding = weights.embedding()
        with torch.inference_mode():
            layers = [weights.layer(index, make) for index in range(self.config.layers)]
            output = make(weights.head(), None)
            self._model = Model(self.config, self._embed, layers, weights.final_norm(), output, dtype)

    def _embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    @torch.inference_mode()
    def write(self, dialogues: Sequence[Dialogue], length: int, seed: int) -> Lessons:
        """Let each dialogue run for `length` tokens."""
        rows = len(dialogues)
        cache = self._cache(rows, length)
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        written = torch.zeros(rows, length, dtype=torch.bool)
        kept: list[tuple[Tensor, Tensor, Tensor]] = []
        sampled = [0] * rows
        for position in range(length):
            for row, dialogue in enumerate(dialogues):
                tokens[row, position], written[row, position] = dialogue.step(sampled[row])
            ids = tokens[:, position].to(self.device)
            features, logits = self._run(ids, np.full(rows, position), cache, (position, 1))
            top, logprobs = _top(logits)
            kept.append((features.bfloat16().cpu(), top, logprobs))
            temperatures = torch.tensor([dialogue.temperature for dialogue in dialogues], device=self.device)
            sampled = _sample(logits, temperatures, generator).tolist()
        features, top, logprobs = (torch.stack(part, dim=1) for part in zip(*kept, strict=True))
        return Lessons(tokens.int(), written, features, top, logprobs)

    @torch.inference_mode()
    def read(self, tokens: Tensor) -> Lessons:
        """Lessons of given text, int64 [n, length]."""
        rows, length = tokens.shape
        cache = self._cache(rows, length)
        positions = np.tile(np.arange(length), rows)
        features, logits = self._run(tokens.flatten().to(self.device), positions, cache, (0, length))
        top, logprobs = _top(logits)
        shape = (rows, length, -1)
        return Lessons(
            tokens.int(),
            torch.zeros(rows, length, dtype=torch.bool),
            features.bfloat16().cpu().view(shape),
            top.view(shape),
            logprobs.view(shape),
        )

    def _cache(self, rows: int, length: int) -> _Cache:
        return _Cache(self.config, rows, length, self._cached, self.device)

    def _run(
        self, ids: Tensor, positions: np.ndarray, cache: _Cache, step: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        if self._taps is None:
            hidden = self._model.hidden(ids, positions, cache, step)
            return hidden.new_empty(len(hidden), 0), self._model.logits(hidden)
        taps: dict[int, Tensor] = dict.fromkeys(self._taps, ids)
        hidden = self._model.hidden(ids, positions, cache, step, taps)
        features = torch.cat((*taps.values(), self._model.normed(hidden)), dim=1)
        return features, self._model.logits(hidden)


def _narrow(weight: Tensor, bias: Tensor | None) -> Linear:
    weight = weight.bfloat16()
    bias = None if bias is None else bias.bfloat16()

    def call(x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), weight, bias).float()

    return call


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, tokens = logits.topk(TOP, dim=-1)
    # The best token's share gives the sum; on a CPU softmax is several times faster than logsumexp.
    sums = values[:, :1] - torch.softmax(logits, dim=-1).amax(dim=-1, keepdim=True).log()
    return tokens.int().cpu(), (values - sums).half().cpu()


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """A token per row at the row's temperature; 0 is greedy."""
    tokens = logits.argmax(dim=1)
    warm = temperatures > 0
    if warm.any():
        shares = torch.softmax(logits[warm] / temperatures[warm, None], dim=1)
        points = torch.rand(len(shares), 1, generator=generator, device=logits.device)
        tokens[warm] = _reached(shares, points)
    return tokens


def _reached(shares: Tensor, points: Tensor) -> Tensor:
    """The index at which the running sum of each row reaches its point of the whole, 0 … 1: int64 [n].

    First the block, then the place in it: sums of blocks cost far less than a running sum of all.
    """
    blocks = F.pad(shares, (0, -shares.shape[1] % _BLOCK)).view(len(shares), -1, _BLOCK)
    ends = blocks.sum(dim=2).cumsum(dim=1)
    points = points * ends[:, -1:]
    block = torch.searchsorted(ends, points)
    before = F.pad(ends, (1, 0)).gather(1, block)
    rows = torch.arange(len(shares), device=shares.device)
    inner = blocks[rows, block[:, 0]].cumsum(dim=1)
    # Rounding must not lead beyond the last token that has a share at all.
    place = torch.searchsorted(inner, torch.minimum(points - before, inner[:, -1:]))
    return (block * _BLOCK + place)[:, 0]
