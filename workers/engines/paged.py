"""What engines over paged keys and values have in common: sequences, passes, and the steps of their start.

Owns the KV of its sequences, cuts windows into passes, and refuses windows that cannot be run. What a pass
computes is its subclasses' business. It knows no architecture and no speculation.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ipc import vocabulary
from ipc.messages import SamplingSpec, StepTime
from workers.attention import Span
from workers.blocks import BLOCK, BlockPool, blocks_for
from workers.device import open_device
from workers.engines.engine import Draw, Window
from workers.footprint import Footprint, KvNeed
from workers.kv import PagedKV
from workers.sampler import Sampler
from workers.workspace import Spec, Workspace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ipc.messages import LaneSpec, MemoryProfile, Vocabulary
    from workers.distribution import Distribution
    from workers.engines.engine import Sample, Score

UBATCH = 0
"""A lane runs one batch at a time."""
_FEW_ROWS = 16
_FORKS = 64
"""Few enough to run at once, whatever was measured."""
_GREEDY = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)
_FILTERED = SamplingSpec(1.0, 0.9, 0, 0.0, 0, 0, (), 1)


class Pass(NamedTuple):
    """Rows of one forward pass: whose they are, their tokens and positions, and which of them give logits."""

    spans: list[Span]
    tokens: list[int]
    positions: list[int]
    wanted: list[int]


class Form(NamedTuple):
    """What a loaded model says of itself: longest sequence and pass in tokens, and keys and values."""

    max_model_len: int
    pass_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: torch.dtype

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_dtype.itemsize


class PagedEngine(ABC):
    """See workers.engines.engine.Engine; rows are a float32 tensor [n, vocabulary] on the lane's device."""

    def __init__(self, spec: LaneSpec) -> None:
        """Load the model in directory `spec.model`; a `max_model_len` of 0 means the model's own context.

        Raises ValueError naming what cannot be served and what can, OSError for an unreadable checkpoint.
        """
        if spec.threads > 0:
            torch.set_num_threads(spec.threads)
        self._spec = spec
        self._home = open_device(spec.device)
        self._device = torch.device(self._home.name)
        self._footprint = Footprint(self._home)
        self.workspace: Workspace[Tensor] = Workspace(self._home, spec.lane)
        self._notes: list[str] = []
        self._step_times: list[StepTime] = []
        with torch.inference_mode():
            self._form = self._load()
        self._vocabulary = vocabulary.read(Path(spec.model))
        self._sampler = Sampler(self._vocabulary.size, self._device)
        self._open: set[int] = set()
        self.workspace.reserve(UBATCH, "confidences", Spec((spec.max_sequences,), torch.float32))
        self._footprint.loaded()

    # ------------------------------------------------------------ what a model has to say

    @abstractmethod
    def _load(self) -> Form:
        """Load what `self._spec` says."""

    @abstractmethod
    def _attach(self, kv: PagedKV) -> None:
        """From now on, this is where keys and values are."""

    @abstractmethod
    def _run(self, part: Pass) -> Tensor:
        """Rows [len(part.wanted), …] of one pass, from which `_logits` come; stores keys and values."""

    @abstractmethod
    def _logits(self, rows: Tensor) -> Tensor:
        """Float32 [n, vocabulary] of rows of any passes."""

    # ------------------------------------------------------------ the steps of a start

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def max_model_len(self) -> int:
        return self._form.max_model_len

    @property
    def pass_tokens(self) -> int:
        # Where rows are run one by one, a pass bounds nothing.
        return self._form.pass_tokens if self._form.pass_tokens > 1 else 0

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    @property
    def step_times(self) -> list[StepTime]:
        return self._step_times

    @property
    def device_id(self) -> str:
        return self._home.identity

    @property
    def reused_tokens(self) -> int:
        return self._kv.pool.reused_tokens

    @abstractmethod
    def set_up_attention(self) -> None: ...

    def profile(self) -> MemoryProfile:
        """The longest prefill pass, then the widest windows of all sequences, at the end of the context."""
        form = self._form
        useful = self._spec.max_sequences * blocks_for(form.max_model_len) * BLOCK
        need = KvNeed(form.kv_bytes_per_token, BLOCK, useful)
        measured = self._footprint.profile(
            self._run_worst,
            need,
            workspace=lambda: self.workspace.nbytes,
            graphs=self._graph_bytes,
            thrown_away=lambda: self._kv.nbytes(),
        )
        self._make_kv(BlockPool(0))
        return measured

    def allocate(self, kv_tokens: int) -> None:
        self._make_kv(BlockPool(kv_tokens // BLOCK, reuse=self._spec.reuse_prefixes))

    def warm_up(self) -> None:
        """A prefill, then steps such as serving takes."""
        pool = self._kv.pool
        seqs = self._open_unnamed(min(self._spec.max_sequences, pool.blocks))
        whole = min(self._form.pass_tokens, self.max_model_len, (pool.blocks - len(seqs) + 1) * BLOCK)
        self.forward([Window(seqs[0], 0, [0] * whole, 1)])
        self._close_unnamed(seqs)
        self._rehearse()

    def _rehearse(self) -> None:
        """Plain steps and the widest windows, of as many sequences as there may be and of one; timed."""
        seqs = self._open_unnamed(min(self._spec.max_sequences, self._kv.pool.blocks))
        widest = min(self._spec.num_speculative_tokens + 1, self.max_model_len, BLOCK)
        self._step_times = []
        for count in sorted({1, widest}):
            for several in (seqs, seqs[:1]):
                rows = len(several) * count
                often = 3 if rows <= _FEW_ROWS else 1  # by rows, not by time: all ranks run the same steps
                took = [self._rehearsed(several, count) for _ in range(often)]
                # The first step of a kind sets things up, which is little beside one of many rows.
                self._step_times.append(StepTime(len(several), rows, min(took[1:] or took)))
        self._close_unnamed(seqs)

    def _rehearsed(self, seqs: Sequence[int], count: int) -> float:
        """Seconds that it took."""
        began = time.perf_counter()
        rows = self.forward([Window(seq, 0, [0] * count, count) for seq in seqs])
        self.sample(rows, [Draw(_GREEDY, 0, 0)] * len(rows))
        return time.perf_counter() - began

    def capture(self) -> str:
        return "none"

    def _graph_bytes(self) -> int:
        """Of graphs such as `capture` makes."""
        return 0

    def lock(self) -> None:
        self.workspace.lock()

    def _run_worst(self) -> None:
        """Over storage that is thrown away, and in which all sequences are one up to what they write.

        On a CPU, what of it is only read takes no memory.
        """
        end, several = self.max_model_len, self._spec.max_sequences
        longest, widest = min(self._form.pass_tokens, end), min(self._spec.num_speculative_tokens + 1, end)
        own = blocks_for(longest) + 1 + several * (blocks_for(widest) + 1)
        pool = BlockPool(blocks_for(end) + own, reuse=False)
        self._make_kv(pool)
        (first,) = self._open_unnamed(1)
        pool.reserve(first, end)
        pool.append(first, [0] * end)
        seqs = [first, *(first - index for index in range(1, several))]
        for seq in seqs[1:]:
            pool.fork(first, seq)
            self._open.add(seq)
        self.forward([Window(seqs[0], end - longest, [0] * longest, 1)])
        rows = self.forward([Window(seq, end - widest, [0] * widest, widest) for seq in seqs])
        self.sample(rows, [Draw(_FILTERED, 0, 0)] * len(rows))

    @torch.inference_mode()
    def _make_kv(self, pool: BlockPool) -> None:
        form = self._form
        self._kv = PagedKV(form.layers, pool, form.kv_heads, form.head_dim, form.kv_dtype, self._device)
        self._open.clear()
        self._attach(self._kv)

    def _open_unnamed(self, count: int) -> list[int]:
        """Sequences for the engine's own use; their numbers are negative, a request's are not."""
        seqs = [-1 - index for index in range(count)]
        for seq in seqs:
            self.open(seq)
        return seqs

    def _close_unnamed(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self.close(seq)
        self._kv.pool.forget_unused()

    # ------------------------------------------------------------ serving

    def open(self, seq: int, tokens: Sequence[int] = ()) -> int:
        most = self._spec.max_sequences
        if len(self._open) >= most:
            raise MemoryError(f"no room for sequence {seq}: {most} (max_sequences) are open")
        held = self._kv.pool.open(seq, tokens)
        self._open.add(seq)
        return held

    def close(self, seq: int) -> None:
        self._kv.pool.close(seq)
        self._open.discard(seq)

    def fork(self, seq: int, other: int) -> None:
        self._kv.pool.fork(seq, other)

    def replace(self, seq: int, other: int) -> None:
        self._kv.pool.replace(seq, other)

    def room(self, length: int) -> int:
        # The last block is shared at first: whoever writes to it copies it.
        each = blocks_for(length) + 1
        # They run as one batch, so their logits are to take about as much as was measured in `profile`.
        rows = self._spec.max_sequences * (self._spec.num_speculative_tokens + 1)
        return max(0, min(self._kv.pool.available // each - len(self._open), max(rows, _FORKS)))

    @torch.inference_mode()
    def forward(self, windows: Sequence[Window]) -> Tensor:
        """See Engine. Raises ValueError, before anything changes, for a window that cannot be run."""
        self._check(windows)
        for window in windows:
            self._kv.pool.truncate(window.seq, window.start)
        for window in windows:
            self._kv.reserve(window.seq, len(window.tokens))
        return self._compute(windows)

    def _compute(self, windows: Sequence[Window]) -> Tensor:
        """Logits of windows that there is room for."""
        rows = []
        for part in self._passes(windows):
            found = self._run(part)
            self._count_in(part)
            if part.wanted:
                rows.append(found)
        if not rows:
            return torch.empty(0, self._vocabulary.size, device=self._device)
        return self._logits(rows[0] if len(rows) == 1 else torch.cat(rows))

    def sample(self, rows: Tensor, draws: Sequence[Draw]) -> list[Sample]:
        return self._sampler.sample(rows, draws)

    def distribution(self, rows: Tensor, index: int, draw: Draw) -> Distribution:
        return self._sampler.distribution(rows[index], draw, index)

    def scores(self, rows: Tensor, tokens: Sequence[int], alternatives: int) -> list[Score]:
        return self._sampler.scores(rows, tokens, alternatives)

    def ranked(self, rows: Tensor, draws: Sequence[Draw], count: int) -> list[list[int]]:
        return self._sampler.ranked(rows, draws, count)

    def confidences(self, rows: Tensor, tokens: Sequence[int]) -> list[float]:
        (room,) = self.workspace.take(UBATCH, "confidences", Spec((len(tokens),), torch.float32))
        return self._sampler.confidences(rows, tokens, room)

    def _check(self, windows: Sequence[Window]) -> None:
        if len({window.seq for window in windows}) != len(windows):
            raise ValueError("a sequence has more than one window in a forward pass")
        size, most = self._vocabulary.size, self.max_model_len
        for seq, start, tokens, rows in windows:
            held, end = self._kv.pool.length(seq), start + len(tokens)
            if not 0 <= start <= held or end > most or not 0 <= rows <= len(tokens):
                raise ValueError(
                    f"sequence {seq} holds {held} of at most {most} tokens; "
                    f"{rows} rows of {len(tokens)} tokens at {start} cannot be run"
                )
            if tokens and (min(tokens) < 0 or max(tokens) >= size):
                wrong = min(tokens) if min(tokens) < 0 else max(tokens)
                raise ValueError(f"sequence {seq}: token {wrong} is not in 0 … {size - 1}")

    def _passes(self, windows: Sequence[Window]) -> Iterator[Pass]:
        """All rows in order, cut into passes of at most the largest number of rows."""
        largest = self._form.pass_tokens
        part = Pass([], [], [], [])
        for seq, start, tokens, rows in windows:
            done = 0
            while done < len(tokens):
                count = min(largest - len(part.tokens), len(tokens) - done)
                first = len(part.tokens)
                part.spans.append(Span(seq, start + done, count))
                part.tokens.extend(tokens[done : done + count])
                part.positions.extend(range(start + done, start + done + count))
                silent = max(0, len(tokens) - rows - done)
                part.wanted.extend(range(first + silent, first + count))
                done += count
                if len(part.tokens) == largest:
                    yield part
                    part = Pass([], [], [], [])
        if part.tokens:
            yield part

    def _count_in(self, part: Pass) -> None:
        """A sequence grows only once its keys and values are there."""
        first = 0
        for span in part.spans:
            self._kv.pool.append(span.seq, part.tokens[first : first + span.length])
            first += span.length
