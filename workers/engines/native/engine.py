"""The engine: windows of sequences cut into passes of fixed shapes, over one model's weights and KV.

Owns the KV of its sequences and the proof that its numbers do not depend on company. It knows no speculation.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from ipc import vocabulary
from ipc.messages import SamplingSpec
from workers.attention import PLAIN, SlotAttention, Span, prove_tiling
from workers.device import open_device
from workers.engines.engine import Draw, Window
from workers.engines.native.config import read_config
from workers.engines.native.model import Model
from workers.engines.native.weights import Checkpoint, Types, Weights
from workers.footprint import Footprint, KvNeed
from workers.kv import BLOCK, SlotKV, blocks_up
from workers.linear import ONE_BY_ONE, ROWS, WIDE_ROWS, choose, every_count, plain
from workers.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ipc.messages import LaneSpec, MemoryProfile, Vocabulary
    from workers.attention import Tiling
    from workers.engines.engine import Sample
    from workers.engines.native.config import ModelConfig
    from workers.engines.tap import Tap
    from workers.linear import MakeLinear, RowBuckets

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDE = 8192
_DEVICE_PASS_TOKENS = 512
_PRECISION = "native engine: on a CPU the dtype is that of the weights; everything is computed in float32"
_NOT_INVARIANT = (
    "native engine: the last bits of a logit depend on what else is in the batch, so where two tokens are "
    "nearly equal the text may depend on speculation"
)


class _Pass(NamedTuple):
    """Rows of one forward pass: their tokens, where they stand, and which of them give logits."""

    spans: list[Span]
    seqs: list[int]
    tokens: list[int]
    positions: list[int]
    wanted: list[int]


class NativeEngine:
    """See workers.engines.engine.Engine; rows are a float32 tensor [n, vocabulary] on the lane's device.

    On a CPU, a token's logits have the same bits whether it is decoded alone, in a window of any width, in a
    batch of any composition or as part of a prompt, and for any number of threads. `invariant=False` gives
    that up, to measure what it costs. On other devices there is no such promise.
    """

    def __init__(self, spec: LaneSpec, *, invariant: bool = True) -> None:
        """Load the model in directory `spec.model`; a `max_model_len` of 0 means the model's own context.

        Raises ValueError naming what cannot be served and what can, OSError for an unreadable checkpoint.
        """
        if spec.threads > 0:
            torch.set_num_threads(spec.threads)
        directory = Path(spec.model)
        config = read_config(directory)
        self._vocabulary = vocabulary.read(directory)
        self._max_model_len = _max_model_len(spec.max_model_len, config)
        self._home = open_device(spec.device)
        self._footprint = Footprint(self._home)
        self._device = torch.device(self._home.name)
        self._max_sequences = spec.max_sequences
        self._widest = spec.num_speculative_tokens + 1
        self._config = config
        self._sliding_window = config.sliding_window
        self._notes: list[str] = []
        with torch.inference_mode():
            dtype = _DTYPES[spec.dtype]
            self._load(config, directory, dtype, invariant)
        self._kv_dtype = self._activations(dtype)
        self._exact = invariant and self._device.type == "cpu"
        self._sampler = Sampler(self._vocabulary.size, self._device)
        self._footprint.loaded()

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def layers(self) -> int:
        return self._config.layers

    @property
    def pass_tokens(self) -> int:
        return self._rows.largest

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    @property
    def device_id(self) -> str:
        return self._home.identity

    @torch.inference_mode()
    def set_up_attention(self) -> None:
        config = self._config
        shape = (config.kv_heads, config.query_heads, config.head_dim)
        self._tiling = PLAIN
        if self._exact:
            self._tiling = prove_tiling(*shape, self._kv_dtype, self._device)
            self._notes.append(_exactness(self._rows, self._head_rows, self._tiling))
        else:
            self._notes.append(_NOT_INVARIANT)

    def profile(self) -> MemoryProfile:
        """The longest prefill pass, then the widest windows of all sequences, at the end of the context."""
        config = self._config
        per_token = 2 * config.layers * config.kv_heads * config.head_dim * self._kv_dtype.itemsize
        need = KvNeed(per_token, BLOCK, self._max_sequences * blocks_up(self._max_model_len))
        measured = self._footprint.profile(self._run_worst, need, lambda: 0)
        del self._attention, self._kv
        return measured

    @torch.inference_mode()
    def allocate(self, kv_tokens: int) -> None:
        config = self._config
        self._kv = SlotKV(
            config.layers,
            self._max_sequences,
            config.kv_heads,
            self._max_model_len,
            config.head_dim,
            self._kv_dtype,
            self._device,
        )
        self._attention = SlotAttention(self._kv, config.query_heads, self._tiling)

    def capture(self) -> str:
        return "none"

    def lock(self) -> None:
        """Holds no workspace yet."""

    def warm_up(self) -> None:
        """A prefill, then windows of 8 and of 1 tokens of all sequences that there may be, with samples."""
        sampling = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)
        # Requests have numbers from 0 on.
        seqs = [-1 - index for index in range(self._kv.slots)]
        for seq in seqs:
            self.open(seq)
        try:
            self.forward([Window(seqs[0], 0, [0] * min(self._rows.largest, self._max_model_len), 1)])
            for count in (min(8, self._max_model_len), 1):
                for windows in (seqs, seqs[:1]):
                    rows = self.forward([Window(seq, 0, [0] * count, count) for seq in windows])
                    self.sample(rows, [Draw(sampling, 0, 0)] * len(rows))
        finally:
            for seq in seqs:
                self.close(seq)

    def open(self, seq: int) -> None:
        self._kv.open(seq)

    def close(self, seq: int) -> None:
        self._kv.close(seq)

    @torch.inference_mode()
    def forward(self, windows: Sequence[Window], tap: Tap | None = None) -> Tensor:
        """See Engine and Tapped. Raises ValueError, before anything changes, for what cannot be run."""
        self._check(windows)
        for window in windows:
            self._kv.truncate(window.seq, window.start)
        hidden = [self._run(part, tap) for part in self._passes(windows)]
        if not hidden:
            return torch.empty(0, self._vocabulary.size, device=self._device)
        return self._logits(hidden[0] if len(hidden) == 1 else torch.cat(hidden))

    def sample(self, rows: Tensor, draws: Sequence[Draw]) -> list[Sample]:
        return self._sampler.sample(rows, draws)

    def confidences(self, rows: Tensor, tokens: Sequence[int]) -> list[float]:
        return self._sampler.confidences(rows, tokens)

    def _load(self, config: ModelConfig, directory: Path, dtype: torch.dtype, invariant: bool) -> None:
        checkpoint = Checkpoint(directory)
        weights = Weights(checkpoint, config, Types(dtype, self._device))
        head = weights.head()
        make, self._rows = self._choose(weights.samples(), ROWS, invariant)
        wide = WIDE_ROWS if config.vocab_size > _WIDE else ROWS
        make_head, self._head_rows = self._choose([head], wide, invariant)
        self._model = Model(
            config,
            weights.embedding(),
            [weights.layer(index, make) for index in range(config.layers)],
            weights.final_norm(),
            make_head(head, None),
            self._activations(dtype),
        )
        checkpoint.check_all_taken()
        if self._device.type == "cpu":
            self._notes.append(_PRECISION)

    def _choose(
        self, samples: list[Tensor], candidates: Sequence[int], invariant: bool
    ) -> tuple[MakeLinear, RowBuckets]:
        if self._device.type != "cpu":
            return plain, every_count(_DEVICE_PASS_TOKENS)
        make, buckets = choose(samples, candidates)
        return make, buckets if invariant else every_count(candidates[-1])

    def _run_worst(self) -> None:
        """Over storage that is thrown away; on a CPU, what of it is only read takes no memory."""
        self.allocate(0)
        end, widest = self._max_model_len, min(self._widest, self._max_model_len)
        seqs = [-1 - index for index in range(self._kv.slots)]
        for seq in seqs:
            self.open(seq)
            self._kv.append(seq, end)
        longest = min(self._rows.largest, end)
        self.forward([Window(seqs[0], end - longest, [0] * longest, 1)])
        rows = self.forward([Window(seq, end - widest, [0] * widest, widest) for seq in seqs])
        sampling = SamplingSpec(1.0, 0.9, 0, 0.0, 0, 0, (), 1)
        self.sample(rows, [Draw(sampling, 0, 0)] * len(rows))

    def _activations(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self._device.type == "cpu" else dtype

    def _check(self, windows: Sequence[Window]) -> None:
        if len({window.seq for window in windows}) != len(windows):
            raise ValueError("a sequence has more than one window in a forward pass")
        size = self._vocabulary.size
        for seq, start, tokens, rows in windows:
            held, end = self._kv.length(seq), start + len(tokens)
            if not 0 <= start <= held or end > self._max_model_len or not 0 <= rows <= len(tokens):
                raise ValueError(
                    f"sequence {seq} holds {held} of at most {self._max_model_len} tokens; "
                    f"{rows} rows of {len(tokens)} tokens at {start} cannot be run"
                )
            if tokens and (min(tokens) < 0 or max(tokens) >= size):
                raise ValueError(f"sequence {seq}: tokens must be in 0 … {size - 1}")

    def _passes(self, windows: Sequence[Window]) -> Iterator[_Pass]:
        """All rows in order, cut into passes of at most the largest number of rows."""
        part = _Pass([], [], [], [], [])
        for seq, start, tokens, rows in windows:
            done = 0
            while done < len(tokens):
                count = min(self._rows.largest - len(part.tokens), len(tokens) - done)
                first = len(part.tokens)
                part.spans.append(Span(self._kv.slot(seq), start + done, count))
                part.seqs.append(seq)
                part.tokens.extend(tokens[done : done + count])
                part.positions.extend(range(start + done, start + done + count))
                silent = max(0, len(tokens) - rows - done)
                part.wanted.extend(range(first + silent, first + count))
                done += count
                if len(part.tokens) == self._rows.largest:
                    yield part
                    part = _Pass([], [], [], [], [])
        if part.tokens:
            yield part

    def _run(self, part: _Pass, tap: Tap | None) -> Tensor:
        """Hidden rows of one pass that logits are wanted of; a sequence grows only once its KV is there."""
        rows = self._rows.fit(len(part.tokens))
        padding = [0] * (rows - len(part.tokens))
        ids = torch.tensor(part.tokens + padding, device=self._device)
        positions = np.array(part.positions + padding, dtype=np.int64)
        step = self._attention.plan(part.spans, rows, self._sliding_window)
        taps: dict[int, Tensor] = dict.fromkeys(tap.layers if tap else (), ids)
        hidden = self._model.hidden(ids, positions, self._attention, step, taps)
        if tap is not None:
            self._fill(tap, part, [*taps.values(), hidden])
        for seq, span in zip(part.seqs, part.spans, strict=True):
            self._kv.append(seq, span.length)
        if len(part.wanted) == rows:
            return hidden
        return hidden.index_select(0, torch.tensor(part.wanted, dtype=torch.long, device=self._device))

    def _fill(self, tap: Tap, part: _Pass, rows: list[Tensor]) -> None:
        """`rows`: the hidden rows of a pass after each of the tap's layers and after the last."""
        first = 0
        for seq, span in zip(part.seqs, part.spans, strict=True):
            wanted = tap.wanted(seq, span.start, span.length)
            if wanted:
                cut = slice(first + wanted.start, first + wanted.stop)
                *lower, last = (part_rows[cut] for part_rows in rows)
                joined = torch.cat((*lower, self._model.normed(last)), dim=1).to(torch.bfloat16)
                data = joined.cpu().view(torch.int16).numpy().tobytes()
                tap.keep(seq, span.start + wanted.start, len(wanted), data)
            first += span.length

    def _logits(self, hidden: Tensor) -> Tensor:
        """The output layer, in calls of whole buckets."""
        logits = []
        for rows in torch.split(hidden, self._head_rows.largest):
            missing = self._head_rows.fit(len(rows)) - len(rows)
            full = F.pad(rows, (0, 0, 0, missing)) if missing else rows
            logits.append(self._model.logits(full)[: len(rows)])
        return logits[0] if len(logits) == 1 else torch.cat(logits)


def _max_model_len(wanted: int, config: ModelConfig) -> int:
    if wanted > config.context:
        raise ValueError(
            f"max_model_len is {wanted}, but the model's context is {config.context}; try {config.context}"
        )
    return wanted or config.context


def _exactness(rows: RowBuckets, head_rows: RowBuckets, tiling: Tiling) -> str:
    """What the proof at load found, for the user."""
    slow = [
        name
        for name, failed in (
            ("layers", rows == ONE_BY_ONE),
            ("output", head_rows == ONE_BY_ONE),
            ("attention", tiling.alone),
        )
        if failed
    ]
    if slow:
        return (
            f"native engine: batch-invariant, but this CPU's {' and '.join(slow)} had to be run row by row, "
            f"which is slow"
        )
    return f"native engine: batch-invariant, proved for up to {rows.largest} rows a pass"
