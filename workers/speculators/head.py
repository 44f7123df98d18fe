"""A drafting head: one decoder layer over the target's hidden rows, as EAGLE-3 has it (arXiv 2503.01840).

Index i of a sequence joins the target's row of position i with the embedding of token i + 1, and guesses
token i + 2. From there it goes on without the target: the head's own row takes the place of the target's.
Keys and values of an index follow from that index alone, so a context can begin anywhere and be bounded.

Owns weights and arithmetic; deploy/train/head.py is the same arithmetic to train by. Float32 on a CPU.
Nothing here has to be exact: what is drafted never shows in the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from workers.engines.native.config import read_config
from workers.engines.native.model import gated, rms_norm, rotate, rotations
from workers.engines.native.weights import Checkpoint, Norm, Types, Weights
from workers.linear import half, plain
from workers.speculators.head_file import read_head

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor

    from ipc.messages import HeadSpec
    from workers.linear import Linear

_FORK_ROOM = 64
"""Indices that a fork of a context takes before it is moved."""


class Entry(NamedTuple):
    """What a step starts from: a row [hidden], fused or of the step before, the token that follows it, the
    row's position, and the context that the step's key and value join."""

    row: Tensor
    token: int
    position: int
    context: Context


class Read(NamedTuple):
    """Rows [n, hidden], fused, of positions from `position` on, each with the token that follows it, which
    join a context."""

    rows: Tensor
    tokens: Sequence[int]
    position: int
    context: Context


class Context:
    """Keys and values of a sequence's latest indices, [kv_heads, room, head_dim] each. Those of drafts stand
    at the end until they are dropped."""

    def __init__(self, kv_heads: int, window: int, head_dim: int, device: torch.device) -> None:
        self._window = window
        self._keys = torch.zeros(kv_heads, 2 * window, head_dim, device=device)
        self._values = torch.zeros_like(self._keys)
        self._kept = 0
        self.length = 0
        self._gone = 0

    @property
    def end(self) -> int:
        """How many indices there were, with those that were moved out: see `fork`."""
        return self._gone + self.length

    def fork(self, end: int) -> Context:
        """A context of its own that holds the indices of this one up to where it once ended, as far as they
        count."""
        other = Context.__new__(Context)
        length = max(0, end - self._gone)
        first = max(0, length - self._window)
        other._gone = 0
        other._window = self._window
        heads, _, head_dim = self._keys.shape
        other._keys = self._keys.new_empty(heads, self._window + _FORK_ROOM, head_dim)
        other._values = torch.empty_like(other._keys)
        other._keys[:, : length - first] = self._keys[:, first:length]
        other._values[:, : length - first] = self._values[:, first:length]
        other._kept = other.length = length - first
        return other

    def append(self, keys: Tensor, values: Tensor) -> None:
        """[n, kv_heads, head_dim] each, n at most the window."""
        count = len(keys)
        if self.length + count > self._keys.shape[1]:
            self._slide()
        end = self.length + count
        self._keys[:, self.length : end] = keys.transpose(0, 1)
        self._values[:, self.length : end] = values.transpose(0, 1)
        self.length = end

    def keep(self) -> None:
        """What there is so far is of committed tokens."""
        self._kept = self.length

    def drop_drafts(self) -> None:
        self.length = self._kept

    def clear(self) -> None:
        self._kept = self.length = 0

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def read(self) -> tuple[Tensor, Tensor]:
        """The latest window's keys and values, [kv_heads, n, head_dim]."""
        first = max(0, self.length - self._window)
        return self._keys[:, first : self.length], self._values[:, first : self.length]

    def _slide(self) -> None:
        first = max(0, self.length - self._window)
        for tensor in (self._keys, self._values):
            tensor[:, : self.length - first] = tensor[:, first : self.length].clone()
        self._kept = max(0, self._kept - first)
        self.length -= first
        self._gone += first


class Head:
    def __init__(self, spec: HeadSpec, target: Path, device: torch.device, *, narrow: bool) -> None:
        """`target`: its checkpoint, for embedding and output rows. `narrow`: keep weights in 16 bits.

        Raises ValueError if the file is no head, or of another target; OSError if it cannot be read.
        """
        config = read_config(target)
        file = read_head(spec, config)
        tensors = file.tensors
        self.device = device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        stored = Weights(Checkpoint(target), config, Types(dtype, device))
        own = tensors.get("embedding.weight")
        self._embedding = stored.embedding() if own is None else own.to(device)
        try:
            self.tokens = tensors.pop("draft_to_target").to(device)
            output = tensors.get("output.weight")
            if output is None:
                output = (stored.embedding() if config.tied else stored.head())[self.tokens]
            make = _narrow if narrow and device.type == "cpu" else _wide

            def linear(*names: str) -> Linear:
                return make(torch.cat([tensors[f"{name}.weight"] for name in names]).to(device, dtype))

            def norm(name: str) -> Norm:
                weight = tensors[f"{name}.weight"].to(device, torch.float32)
                return Norm(weight * len(weight) ** 0.5, len(weight) * file.norm_eps)

            self._fuse, self._qkv = linear("fuse"), linear("q_proj", "k_proj", "v_proj")
            self._out, self._gate_up, self._down = (
                linear("o_proj"),
                linear("gate_up_proj"),
                linear("down_proj"),
            )
            self._norm_embed, self._norm_feature = norm("norm_embed"), norm("norm_feature")
            self._norm_mlp, self._norm_out = norm("norm_mlp"), norm("norm_out")
        except KeyError as error:
            raise ValueError(f"{spec.file} is no drafting head: it has no tensor {error}") from None
        self._output = make(output.to(device, dtype))
        rows, features = tensors["fuse.weight"].shape
        joined = self._embedding.shape[1] + rows
        if tensors["q_proj.weight"].shape[1] != joined or 2 * features != spec.row_bytes:
            raise ValueError(
                f"{spec.file} is a head for rows of {rows}, but the target's are of {config.hidden_size}"
            )
        self.row_bytes, self.window = spec.row_bytes, spec.window
        self._head_dim = file.head_dim
        self._heads = len(tensors["q_proj.weight"]) // file.head_dim
        self._kv_heads = len(tensors["k_proj.weight"]) // file.head_dim
        self._dtype = dtype
        self._frequencies = file.inverse_frequencies
        self._normed_residual = file.normed_residual

    def context(self) -> Context:
        return Context(self._kv_heads, self.window, self._head_dim, self.device)

    def fuse(self, rows: Tensor) -> Tensor:
        """The target's hidden rows [n, features] in bfloat16, on any device → [n, hidden]."""
        return self._fuse(rows.to(self.device, self._dtype))

    def absorb(self, reads: Sequence[Read]) -> None:
        """Put rows into contexts, all at once. No more of one read than the window counts."""
        reads = [_latest(read, self.window) for read in reads if len(read.rows)]
        if not reads:
            return
        tokens = [token for read in reads for token in read.tokens]
        positions = np.concatenate([np.arange(len(read.rows)) + read.position for read in reads])
        qkv = self._joined(torch.cat([read.rows for read in reads]), tokens, positions)
        for read, part in zip(reads, torch.split(qkv, [len(read.rows) for read in reads]), strict=True):
            read.context.append(part[:, self._heads : -self._kv_heads], part[:, -self._kv_heads :])

    def step(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor]:
        """One step of several sequences: the rows to go on from, [n, hidden], and logits over `self.tokens`,
        float32 [n, drafted vocabulary]."""
        rows = torch.stack([entry.row for entry in entries])
        positions = np.array([entry.position for entry in entries])
        qkv = self._joined(rows, [entry.token for entry in entries], positions)
        attended = torch.stack(
            [self._attend(one, entry.context) for one, entry in zip(qkv, entries, strict=True)]
        )
        if self._normed_residual:
            rows = rms_norm(rows, self._norm_feature)
        rows = rows + self._out(attended)
        rows = rows + self._down(gated(self._gate_up(rms_norm(rows, self._norm_mlp))))
        return rows, self._output(rms_norm(rows, self._norm_out)).float()

    def _joined(self, rows: Tensor, tokens: Sequence[int], positions: np.ndarray) -> Tensor:
        """Queries, keys and values [n, heads + 2 · kv_heads, head_dim], rotated."""
        ids = torch.tensor(tokens, device=self.device)
        embedded = rms_norm(F.embedding(ids, self._embedding).to(self._dtype), self._norm_embed)
        x = torch.cat((embedded, rms_norm(rows, self._norm_feature)), dim=1)
        qkv = self._qkv(x).view(len(rows), -1, self._head_dim)
        rotate(qkv[:, : -self._kv_heads], rotations(positions, self._frequencies).to(self.device))
        return qkv

    def _attend(self, qkv: Tensor, context: Context) -> Tensor:
        """One row's [heads + 2 · kv_heads, head_dim], whose key and value join the context → [hidden]."""
        context.append(qkv[None, self._heads : -self._kv_heads], qkv[None, -self._kv_heads :])
        keys, values = context.read()
        queries = qkv[: self._heads].view(1, self._kv_heads, -1, self._head_dim)
        return F.scaled_dot_product_attention(queries, keys[None], values[None]).view(-1)


def _latest(read: Read, count: int) -> Read:
    skipped = max(0, len(read.rows) - count)
    return Read(read.rows[skipped:], read.tokens[skipped:], read.position + skipped, read.context)


def _wide(weight: Tensor) -> Linear:
    return plain(weight, None)


def _narrow(weight: Tensor) -> Linear:
    try:
        return half(weight, None)
    except (RuntimeError, AttributeError):  # not in this build of torch, or not for this CPU or these weights
        return plain(weight, None)
