"""Short windows of several sequences, run by captured graphs: one for each (batch bucket, rows per window).

A graph needs shapes that do not change, and inputs that stand where they stood. So a batch is padded up to a
bucket and a window to all its rows, by repeating what is real: no token, position or block is made up, and
what is written twice is the same. Every sequence is read as far as the longest can be.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from workers import scratch
from workers.attention import Group, Step
from workers.blocks import BLOCK, blocks_for
from workers.engines.native.model import rotations
from workers.graphs import Graphs, Shape, batch_buckets
from workers.workspace import Spec

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from torch import Tensor

    from workers.attention import PagedAttention
    from workers.device import Device
    from workers.engines.engine import Window
    from workers.engines.native.config import ModelConfig
    from workers.engines.native.model import Model
    from workers.scratch import Need, Widths
    from workers.workspace import Workspace


_CALL_BLOCKS = 1024
"""So many blocks of keys are gathered for one call at most, unless one sequence has more."""


class Inputs(NamedTuple):
    """What a graph reads and writes outside its scratch storage, of the largest shape; kept for good.

    ids, positions [rows], rotations float32 [rows, 1, 2, 2, head_dim / 2], places [rows, 2 · kv_heads],
    keys [2 · kv_heads · blocks · batch]: see PagedKV; logits float32 [rows, vocabulary].
    """

    ids: Tensor
    positions: Tensor
    rotations: Tensor
    places: Tensor
    keys: Tensor
    logits: Tensor


class _Places(NamedTuple):
    """Which heads are queries, in the order of the results, and where the result of each row and head is."""

    queries: Tensor
    results: Tensor


class Decode:
    """The graphs of one ubatch. `rows`: of the longest draft and the token before it."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        widths: Widths,
        workspace: Workspace[Tensor],
        device: Device[Any],
        ubatch: int,
        most: Shape,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._config = config
        self._widths = widths
        self._workspace = workspace
        self._ubatch = ubatch
        self._blocks = blocks_for(max_model_len)
        self._device = torch.device(device.name)
        self.shapes = [
            Shape(batch, rows) for batch in batch_buckets(most.batch) for rows in sorted({1, most.rows})
        ]
        self.graphs = Graphs(device, workspace, ubatch)
        self._places: dict[Shape, _Places] = {}
        self._inputs = self._keep(most)
        largest = [spec for spec in scratch.specs(widths, self._need(most), BLOCK) if spec is not None]
        workspace.reserve(ubatch, "decode", *largest)

    def attach(self, attention: PagedAttention) -> None:
        """Keys and values are here from now on: what was captured over others must have been released."""
        self._attention = attention

    def fits(self, windows: Sequence[Window]) -> Shape | None:
        """The graph that can run these windows, if there is one."""
        longest = max((len(window.tokens) for window in windows), default=0)
        shortest = min((len(window.tokens) for window in windows), default=0)
        return self.graphs.fit(len(windows), longest) if shortest else None

    def forward(self, shape: Shape, windows: Sequence[Window]) -> Tensor:
        """Logits of the rows that the windows want; stores their keys and values, for which there is room."""
        self._fill(shape, windows)
        self.graphs.replay(shape)
        wanted: list[int] = []
        for index, window in enumerate(windows):
            end = index * shape.rows + len(window.tokens)
            wanted.extend(range(end - window.rows, end))
        # A copy: the next replay writes here.
        return self._inputs.logits.index_select(0, self._index(np.array(wanted, dtype=np.int64)))

    def run(self, shape: Shape) -> None:
        """What is captured: from the inputs to the logits."""
        rows = shape.batch * shape.rows
        room = scratch.take(self._workspace, self._ubatch, self._widths, self._need(shape), BLOCK)
        step = self._step(shape).within(room.attending)
        table, ids = self._inputs.rotations[:rows], self._inputs.ids[:rows]
        hidden = self._model.run(ids, table, self._attention, step, scratch=room.layers)
        logits = self._model.logits(hidden)
        if len(logits):  # only the first rank has any
            self._inputs.logits[:rows].copy_(logits)

    def _keep(self, most: Shape) -> Inputs:
        config, rows = self._config, most.batch * most.rows
        wide, whole = torch.float32, torch.int64
        specs = {
            "ids": Spec((rows,), whole),
            "positions": Spec((rows,), whole),
            "rotations": Spec((rows, 1, 2, 2, config.head_dim // 2), wide),
            "places": Spec((rows, 2 * config.kv_heads), whole),
            "keys": Spec((2 * config.kv_heads * self._blocks * most.batch,), whole),
            "logits": Spec((rows, config.vocab_size), wide),
        }
        kept = {
            name: self._workspace.keep(self._ubatch, "decode", name, spec) for name, spec in specs.items()
        }
        for tensor in kept.values():
            tensor.zero_()  # block 0 and token 0 exist, so that shapes can be tried before there is any input
        return Inputs(**kept)

    def _calls(self, batch: int) -> list[range]:
        """Sequences of each call of the attention kernel."""
        per_call = max(1, _CALL_BLOCKS // self._blocks)
        return [range(first, min(first + per_call, batch)) for first in range(0, batch, per_call)]

    def _need(self, shape: Shape) -> Need:
        config, heads = self._config, self._config.query_heads
        rows, widest = shape.batch * shape.rows, len(self._calls(shape.batch)[0])
        return scratch.Need(
            rows=rows,
            outputs=rows * heads,
            queries=widest * shape.rows * heads,
            pieces=2 * widest * config.kv_heads * self._blocks,
            scores=widest * shape.rows * heads * self._blocks * BLOCK,
        )

    def _fill(self, shape: Shape, windows: Sequence[Window]) -> None:
        """Write the inputs: windows repeat their first row, the batch its first window, up to the shape."""
        padded = [*windows, *[windows[0]] * (shape.batch - len(windows))]
        filled = [_padded(window, shape.rows) for window in padded]
        tokens = list(chain.from_iterable(tokens for tokens, _ in filled))
        positions = np.array(list(chain.from_iterable(places for _, places in filled)), dtype=np.int64)
        seqs = [window.seq for window in padded for _ in range(shape.rows)]
        kv, rows, inputs = self._attention.kv, len(tokens), self._inputs
        inputs.ids[:rows].copy_(torch.tensor(tokens))
        inputs.positions[:rows].copy_(torch.from_numpy(positions))
        inputs.rotations[:rows].copy_(rotations(positions, self._config.inverse_frequencies))
        inputs.places[:rows].copy_(kv.places(seqs, positions.tolist()))
        first = 0
        for call in self._calls(shape.batch):
            keys = kv.pieces([padded[index].seq for index in call], self._blocks)
            inputs.keys[first : first + len(keys)].copy_(keys)
            first += len(keys)

    def _step(self, shape: Shape) -> Step:
        """The same for every replay, but for what the inputs hold."""
        config, inputs, places = self._config, self._inputs, self._places_of(shape)
        rows, per_row = shape.batch * shape.rows, config.query_heads
        positions = inputs.positions[:rows].view(shape.batch, shape.rows)
        groups, first = [], 0
        for call in self._calls(shape.batch):
            keys = 2 * len(call) * config.kv_heads * self._blocks
            these = slice(call.start * shape.rows * per_row, call.stop * shape.rows * per_row)
            mask = self._mask(positions[call.start : call.stop])
            group = inputs.keys[first : first + keys], places.queries[these], mask, these
            groups.append(Group(len(call), self._blocks * BLOCK, *group))
            first += keys
        return Step(rows, inputs.places[:rows], tuple(groups), rows * per_row, places.results)

    def _places_of(self, shape: Shape) -> _Places:
        """Made when a shape first runs, which is before it is captured: a capture cannot copy to a device."""
        if shape not in self._places:
            config, rows = self._config, shape.batch * shape.rows
            heads = config.query_heads
            row = np.arange(rows).reshape(shape.batch, 1, shape.rows, 1)
            head = np.arange(heads).reshape(1, config.kv_heads, 1, heads // config.kv_heads)
            queries = (row * (heads + 2 * config.kv_heads) + head).reshape(-1)
            results = np.empty(rows * heads, dtype=np.int64)
            results[(row * heads + head).reshape(-1)] = np.arange(rows * heads)
            self._places[shape] = _Places(self._index(queries), self._index(results))
        return self._places[shape]

    def _mask(self, positions: Tensor) -> Tensor:
        """Positions [batch, rows] → 0 and -inf [batch · kv_heads, rows · heads per KV head, length]."""
        key = torch.arange(self._blocks * BLOCK, device=self._device)
        hidden = key > positions[..., None]
        if window := self._config.sliding_window:
            hidden |= key <= positions[..., None] - window
        mask = torch.zeros(hidden.shape, dtype=self._widths.dtype, device=self._device)
        mask.masked_fill_(hidden, float("-inf"))
        batch, rows, length = mask.shape
        kv_heads = self._config.kv_heads
        rows *= self._config.query_heads // kv_heads
        per_head = mask.repeat_interleave(rows // mask.shape[1], dim=1).view(batch, 1, rows, length)
        return per_head.expand(batch, kv_heads, rows, length).reshape(-1, rows, length)

    def _index(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64)).to(self._device)


def _padded(window: Window, rows: int) -> tuple[list[int], list[int]]:
    """Tokens and positions of a window, its first row repeated behind the others."""
    missing = rows - len(window.tokens)
    tokens = [*window.tokens, *[window.tokens[0]] * missing]
    return tokens, [*range(window.start, window.start + len(window.tokens)), *[window.start] * missing]
