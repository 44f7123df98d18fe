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

TOP = 16
"""So many of the target's most probable tokens are kept per position."""


class Lessons(NamedTuple):
    """What a batch of `n` rows of `length` tokens teaches; position t's `top` is about token t + 1.

    tokens: int32 [n, length]. written: bool [n, length], sampled by the target rather than given.
    features: bfloat16 [n, length, 3 · hidden]. top_tokens: int32, top_logprobs: float16 [n, length, TOP].
    """

    tokens: Tensor
    written: Tensor
    features: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor


class _Cache:
    """Keys and values of rows that all have the same length; see workers.engines.native.model.Attention."""

    def __init__(
        self, layers: int, rows: int, length: int, kv_heads: int, head_dim: int, device: str
    ) -> None:
        shape = (rows, kv_heads, length, head_dim)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        self._keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self._rows, self._kv_heads, self._head_dim = rows, kv_heads, head_dim

    def attend(self, layer: int, qkv: Tensor, step: tuple[int, int], scale: float) -> Tensor:
        """qkv [rows · count, heads, head_dim] of `count` positions from `start` on; step = (start, count).

        Several positions at once may only be the first ones.
        """
        start, count = step
        heads = qkv.view(self._rows, count, -1, self._head_dim).transpose(1, 2)
        queries = heads[:, : -2 * self._kv_heads]
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, start : start + count] = heads[:, -2 * self._kv_heads : -self._kv_heads]
        values[:, :, start : start + count] = heads[:, -self._kv_heads :]
        keys, values = keys[:, :, : start + count], values[:, :, : start + count]
        if count > 1:
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, scale=scale, enable_gqa=True
            )
            return out.transpose(1, 2).reshape(self._rows * count, -1)
        grouped = queries.reshape(self._rows, self._kv_heads, -1, self._head_dim)
        weights = torch.softmax((grouped @ keys.transpose(2, 3)).mul_(scale), dim=-1)
        return (weights @ values).reshape(self._rows, -1)


class Teacher:
    """`taps`: after how many layers a feature row's first parts are taken; the last is the final norm."""

    def __init__(self, directory: Path, taps: tuple[int, int], device: str = "cpu") -> None:
        """Raises OSError or ValueError if there is no checkpoint that the native engine can serve."""
        self.config = read_config(directory)
        self.device = device
        self._taps = taps
        dtype = torch.float32 if device == "cpu" else torch.bfloat16
        checkpoint = Checkpoint(directory)
        weights = Weights(checkpoint, self.config, Types(dtype, torch.device(device)))
        self.embedding = weights.embedding()
        with torch.inference_mode():
            layers = [weights.layer(index, plain) for index in range(self.config.layers)]
            output = plain(weights.head(), None)
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
        config = self.config
        return _Cache(config.layers, rows, length, config.kv_heads, config.head_dim, self.device)

    def _run(
        self, ids: Tensor, positions: np.ndarray, cache: _Cache, step: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        taps: dict[int, Tensor] = dict.fromkeys(self._taps, ids)
        hidden = self._model.hidden(ids, positions, cache, step, taps)
        features = torch.cat((*taps.values(), self._model.normed(hidden)), dim=1)
        return features, self._model.logits(hidden)


def _top(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, tokens = logits.topk(TOP, dim=-1)
    return tokens.int().cpu(), (values - logits.logsumexp(dim=-1, keepdim=True)).half().cpu()


def _sample(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """A token per row at the row's temperature; 0 is greedy."""
    tokens = logits.argmax(dim=1)
    warm = temperatures > 0
    if warm.any():
        sums = torch.softmax(logits[warm] / temperatures[warm, None], dim=1).cumsum(dim=1)
        points = torch.rand(len(sums), 1, generator=generator, device=logits.device) * sums[:, -1:]
        tokens[warm] = torch.searchsorted(sums, points)[:, 0].clamp(max=logits.shape[1] - 1)
    return tokens
