"""The native engine: passes of fixed shapes over one model's weights, and the proof that they are exact.

What does not depend on the model is `workers.engines.paged`. It knows no speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from ipc.messages import LAST_NORM
from workers import scratch
from workers.attention import PagedAttention, largest_need
from workers.blocks import BLOCK
from workers.engines.engine import Sample
from workers.engines.native.config import read_config
from workers.engines.native.decode import Decode
from workers.engines.native.loading import Wanted, load
from workers.engines.paged import UBATCH, Form, PagedEngine
from workers.graphs import Shape
from workers.linear import ONE_BY_ONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ipc.messages import LaneSpec
    from workers.engines.engine import Draw, Score, Window
    from workers.engines.native.config import ModelConfig
    from workers.engines.native.loading import LoadedModel
    from workers.engines.paged import Pass
    from workers.engines.tap import Tap
    from workers.group import Group
    from workers.kv import PagedKV

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PRECISION = "native engine: on this CPU the dtype is that of the weights; everything is computed in float32"
_NOT_INVARIANT = (
    "native engine: the last bits of a logit depend on what else is in the batch, so where two tokens are "
    "nearly equal the text may depend on speculation"
)


class NativeEngine(PagedEngine):
    """See PagedEngine.

    On a CPU, a token's logits have the same bits whether it is decoded alone, in a window of any width, in a
    batch of any composition or as part of a prompt, and for any number of threads. `invariant=False` gives
    that up, to measure what it costs. On other devices there is no such promise.
    """

    def __init__(self, spec: LaneSpec, group: Group | None = None, *, invariant: bool = True) -> None:
        """`group`: the ranks that share the model, if this is one of several."""
        self._invariant = invariant
        self._group = group
        self._tap: Tap | None = None
        self._decode: Decode | None = None
        super().__init__(spec)

    @property
    def layers(self) -> int:
        return self._config.layers

    @torch.inference_mode()
    def set_up_attention(self) -> None:
        form, config = self._form, self._config
        heads = config.query_heads, config.kv_heads
        worst = largest_need(self._tiling, heads, form.pass_tokens, form.max_model_len)
        wanted = scratch.specs(self._widths, worst, BLOCK)
        self.workspace.reserve(UBATCH, "attention setup", *(spec for spec in wanted if spec is not None))
        if self._home.captures:
            most = Shape(self._spec.max_sequences, self._spec.num_speculative_tokens + 1)
            self._decode = Decode(
                *(self._model, config, self._widths, self.workspace, self._home, UBATCH, most),
                max_model_len=form.max_model_len,
            )

    def _load(self) -> Form:
        exact = self._invariant and self._device.type == "cpu"
        directory = Path(self._spec.model)
        max_model_len = _max_model_len(self._spec.max_model_len, read_config(directory))
        wanted = Wanted(_DTYPES[self._spec.dtype], self._device, exact, self._group)
        loaded = load(directory, wanted)
        self._model, self._config, self._widths, attending, self._rows, self._head_rows, notes = loaded
        self._tiling, self._kernel = attending.tiling, attending.kernel
        if self._device.type == "cpu" and self._widths.dtype == torch.float32:
            self._notes.append(_PRECISION)
        self._notes += [*notes, _exactness(loaded) if exact else _NOT_INVARIANT]
        config = self._config
        kv = config.layers, config.kv_heads, config.head_dim, self._widths.kv_dtype
        return Form(max_model_len, self._rows.largest, *kv)

    def _run_worst(self) -> None:
        """One layer takes as much memory as all, one after the other."""
        layers, self._model.depth = self._model.depth, 1
        super()._run_worst()
        self._model.depth = layers

    @torch.inference_mode()
    def _graph_bytes(self) -> int:
        return self._decode.graphs.measure(self._decode.shapes, self._decode.run) if self._decode else 0

    @torch.inference_mode()
    def capture(self) -> str:
        if self._decode is None:
            return "none"
        self._decode.graphs.capture(self._decode.shapes, self._decode.run)
        self._rehearse()  # with graphs it takes another time
        return f"{len(self._decode.shapes)} graphs"

    def _attach(self, kv: PagedKV) -> None:
        heads, dtype = self._config.query_heads, self._widths.attending
        self._attention = PagedAttention(kv, heads, dtype, self._tiling, self._kernel)
        if self._decode is not None:
            self._decode.attach(self._attention)

    def _compute(self, windows: Sequence[Window]) -> Tensor:
        # Graphs end in logits: whoever taps what is below them takes the long way.
        shape = self._decode.fits(windows) if self._decode and self._tap is None else None
        if self._decode is None or shape is None:
            return super()._compute(windows)
        rows = self._decode.forward(shape, windows)
        for window in windows:
            self._kv.pool.append(window.seq, list(window.tokens))
        return rows

    @torch.inference_mode()
    def forward(self, windows: Sequence[Window], tap: Tap | None = None) -> Tensor:
        """See Engine and Tapped."""
        self._tap = tap
        return super().forward(windows)

    def sample(self, rows: Tensor, draws: Sequence[Draw]) -> list[Sample]:
        """See Engine; a rank that is not the first has no rows, and what it says of them means nothing."""
        return super().sample(rows, draws) if self._speaks else [Sample(0)] * len(draws)

    def scores(self, rows: Tensor, tokens: Sequence[int], alternatives: int) -> list[Score]:
        """As `sample`."""
        return super().scores(rows, tokens, alternatives) if self._speaks else []

    @property
    def _speaks(self) -> bool:
        return self._group is None or self._group.rank == 0

    def _run(self, part: Pass) -> Tensor:
        """Hidden rows [len(part.wanted), hidden]."""
        rows = self._rows.fit(len(part.tokens))
        padding = [0] * (rows - len(part.tokens))
        ids = torch.tensor(part.tokens + padding, device=self._device)
        positions = np.array(part.positions + padding, dtype=np.int64)
        step = self._attention.plan(part.spans, rows, self._config.sliding_window)
        room = scratch.take(self.workspace, UBATCH, self._widths, step.need(rows), BLOCK)
        step = step.within(room.attending)
        taps: dict[int, Tensor] = dict.fromkeys(self._tap.layers if self._tap else (), ids)
        taps.pop(LAST_NORM, None)
        hidden = self._model.hidden(ids, positions, self._attention, step, taps, room.layers)
        if self._tap is not None:
            self._fill(self._tap, part, {LAST_NORM: hidden, **taps})
        # A copy, since the next pass works in the same storage.
        return hidden.index_select(0, torch.tensor(part.wanted, dtype=torch.long, device=self._device))

    def _fill(self, tap: Tap, part: Pass, rows: dict[int, Tensor]) -> None:
        """`rows`: hidden rows after each of the tap's layers, and as LAST_NORM those to be normed yet."""
        first = 0
        for span in part.spans:
            wanted = tap.wanted(span.seq, span.start, span.length)
            if wanted:
                cut = slice(first + wanted.start, first + wanted.stop)
                parts = [
                    self._model.normed(rows[layer][cut]) if layer == LAST_NORM else rows[layer][cut]
                    for layer in tap.layers
                ]
                joined = torch.cat(parts, dim=1).to(torch.bfloat16)
                tap.keep(span.seq, span.start + wanted.start, joined)
            first += span.length

    def _logits(self, rows: Tensor) -> Tensor:
        """The output layer, in calls of whole buckets."""
        logits = []
        for hidden in torch.split(rows, self._head_rows.largest):
            missing = self._head_rows.fit(len(hidden)) - len(hidden)
            full = F.pad(hidden, (0, 0, 0, missing)) if missing else hidden
            logits.append(self._model.logits(full)[: len(hidden)])
        return logits[0] if len(logits) == 1 else torch.cat(logits)


def _max_model_len(wanted: int, config: ModelConfig) -> int:
    if wanted > config.context:
        raise ValueError(
            f"max_model_len is {wanted}, but the model's context is {config.context}; try {config.context}"
        )
    return wanted or config.context


def _exactness(loaded: LoadedModel) -> str:
    """What the proof at load found, for the user."""
    slow = [
        name
        for name, failed in (
            ("layers", loaded.rows == ONE_BY_ONE),
            ("output", loaded.head_rows == ONE_BY_ONE),
            ("attention", loaded.attending.tiling.alone),
        )
        if failed
    ]
    if slow:
        return (
            f"native engine: batch-invariant, but this CPU's {' and '.join(slow)} had to be run row by row, "
            f"which is slow"
        )
    return f"native engine: batch-invariant, proved for up to {loaded.rows.largest} rows a pass"
