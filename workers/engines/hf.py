"""The `hf` engine: any decoder-only transformers model whose attention goes through AttentionInterface.

Owns the KV of its sequences, packs windows into passes, and proves at load that windows over its KV give the
logits of transformers' own attention: what would decode wrongly is refused. It knows no architecture.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ipc.messages import SamplingSpec
from ipc.vocabulary import read
from workers.device import open_device
from workers.engines.engine import Draw, Window
from workers.engines.hf_attention import PackedWindows, Piece
from workers.engines.hf_model import HfModel
from workers.footprint import Footprint, KvNeed
from workers.kv import BLOCK, SlotKV, blocks_up
from workers.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from ipc.messages import LaneSpec, MemoryProfile, Vocabulary
    from workers.engines.engine import Sample

PASS_TOKENS = 512
_PROOF_TOKENS = 24
_NOTE = (
    "hf engine: the last bits of a logit depend on what else is in the batch, so where two tokens are nearly "
    "equal the text may depend on speculation; on the CPU the native engine's does not"
)


class HfEngine:
    """See workers.engines.engine.Engine; rows are a float32 tensor [n, vocabulary] on the lane's device."""

    def __init__(self, spec: LaneSpec) -> None:
        """Load and prove the model in directory `spec.model`; a `max_model_len` of 0 means its own context.

        Raises ValueError naming what cannot be served and what can, OSError for an unreadable checkpoint,
        MemoryError or torch.OutOfMemoryError if weights or KV do not fit.
        """
        if spec.threads > 0:
            torch.set_num_threads(spec.threads)
        self._home = open_device(spec.device)
        self._footprint = Footprint(self._home)
        self._model = HfModel(spec)
        self._vocabulary = read(Path(spec.model))
        if self._vocabulary.size != self._model.vocabulary_size:
            raise self._model.refusal(
                f"it has {self._model.vocabulary_size} logits for a vocabulary of {self._vocabulary.size}"
            )
        self._max_model_len = self._model.max_model_len(spec.max_model_len)
        self._max_sequences = spec.max_sequences
        self._widest = spec.num_speculative_tokens + 1
        self._kv = self._make_kv(min(2, spec.max_sequences), min(_PROOF_TOKENS, self._max_model_len))
        self._sampler = Sampler(self._vocabulary.size, self._model.device)
        self._footprint.loaded()

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def pass_tokens(self) -> int:
        return PASS_TOKENS

    @property
    def notes(self) -> list[str]:
        return [_NOTE, *self._model.notes]

    @property
    def device_id(self) -> str:
        return self._home.identity

    def set_up_attention(self) -> None:
        """Proves what it will run. Raises ValueError for a model that would decode wrongly over our KV."""
        self._prove()

    def profile(self) -> MemoryProfile:
        """A full pass, then the widest windows of all sequences, at the end of the context."""
        kv = self._kv
        per_token = 2 * kv.layers * kv.kv_heads * kv.head_dim * kv.dtype.itemsize
        need = KvNeed(per_token, BLOCK, self._max_sequences * blocks_up(self._max_model_len))
        measured = self._footprint.profile(self._run_worst, need, lambda: 0)
        self._kv = kv
        return measured

    def allocate(self, kv_tokens: int) -> None:
        self._kv = self._make_kv(self._max_sequences, self._max_model_len)

    def capture(self) -> str:
        return "none"

    def lock(self) -> None:
        """Holds no workspace: its temporaries are the library's own."""

    def warm_up(self) -> None:
        """One prefill, then windows of 8 and of 1 tokens of all sequences that there may be, with samples."""
        sampling = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)
        seqs = self._open_unnamed(self._kv.slots)
        try:
            self.forward([Window(seqs[0], 0, [0] * min(PASS_TOKENS, self._max_model_len), 1)])
            for count in (min(8, self._max_model_len), 1):
                rows = self.forward([Window(seq, 0, [0] * count, count) for seq in seqs])
                self.sample(rows, [Draw(sampling, 0, 0)] * len(rows))
        finally:
            for seq in seqs:
                self.close(seq)

    def open(self, seq: int) -> None:
        self._kv.open(seq)

    def close(self, seq: int) -> None:
        self._kv.close(seq)

    @torch.inference_mode()
    def forward(self, windows: Sequence[Window]) -> Tensor:
        """See Engine. Raises ValueError, before anything changes, for a window that cannot be run."""
        self._check(windows)
        rows = [self._run(batch) for batch in _passes(windows, PASS_TOKENS)]
        return torch.cat(rows) if rows else torch.empty(0, self._vocabulary.size, device=self._model.device)

    def sample(self, rows: Tensor, draws: Sequence[Draw]) -> list[Sample]:
        return self._sampler.sample(rows, draws)

    def confidences(self, rows: Tensor, tokens: Sequence[int]) -> list[float]:
        return self._sampler.confidences(rows, tokens)

    def _make_kv(self, slots: int, capacity: int) -> SlotKV:
        layers = self._model.layers
        return SlotKV(
            len(layers),
            slots,
            max(layer.kv_heads for layer in layers),
            capacity,
            max(max(layer.key_dim, layer.value_dim) for layer in layers),
            self._model.dtype,
            self._model.device,
        )

    def _run_worst(self) -> None:
        """Over storage that is thrown away; on a CPU, what of it is only read takes no memory."""
        self.allocate(0)
        end, widest = self._max_model_len, min(self._widest, self._max_model_len)
        seqs = self._open_unnamed(self._kv.slots)
        for seq in seqs:
            self._kv.append(seq, end)
        longest = min(PASS_TOKENS, end)
        self.forward([Window(seqs[0], end - longest, [0] * longest, 1)])
        rows = self.forward([Window(seq, end - widest, [0] * widest, widest) for seq in seqs])
        sampling = SamplingSpec(1.0, 0.9, 0, 0.0, 0, 0, (), 1)
        self.sample(rows, [Draw(sampling, 0, 0)] * len(rows))

    def _check(self, windows: Sequence[Window]) -> None:
        if len({window.seq for window in windows}) != len(windows):
            raise ValueError("a sequence has more than one window in a forward pass")
        for seq, start, tokens, rows in windows:
            held, end = self._kv.length(seq), start + len(tokens)
            if not 0 <= start <= held or end > self._max_model_len or not 0 <= rows <= len(tokens):
                raise ValueError(
                    f"sequence {seq} holds {held} of at most {self._max_model_len} tokens; "
                    f"{rows} rows of {len(tokens)} tokens at {start} cannot be run"
                )
            size = self._vocabulary.size
            if wrong := [token for token in tokens if not 0 <= token < size]:
                raise ValueError(f"sequence {seq}: token {wrong[0]} is not in 0 … {size - 1}")

    def _run(self, batch: Sequence[Window]) -> Tensor:
        """Logits of one pass. A sequence's length grows only when its keys and values are there."""
        pieces: list[Piece] = []
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for seq, start, tokens, rows in batch:
            self._kv.truncate(seq, start)
            if not tokens:
                continue
            pieces.append(Piece(self._kv.slot(seq), start, len(tokens)))
            ids.extend(tokens)
            positions.extend(range(start, start + len(tokens)))
            wanted.extend(range(len(ids) - rows, len(ids)))
        if not ids:
            return torch.empty(0, self._vocabulary.size, device=self._model.device)
        lane = PackedWindows(pieces, self._kv)
        logits = self._model.logits(self._tensor(ids), self._tensor(positions), self._tensor(wanted), lane)
        for seq, _, tokens, _ in batch:
            self._kv.append(seq, len(tokens))
        return logits

    @torch.inference_mode()
    def _prove(self) -> None:
        """Two sequences in uneven, packed windows must give the logits that transformers has for each alone.

        This finds what a model does beside its attention calls: state in other layers, masks or biases of its
        own, positions taken from the place in the batch. Raises ValueError.
        """
        length = min(_PROOF_TOKENS, self._max_model_len)
        cuts = ([0, length // 3, length // 3 + 1, length], [0, length // 2, length - length // 8, length])
        seqs = self._open_unnamed(min(2, self._kv.slots))
        size = self._vocabulary.size
        ids = {seq: [(31 * i * i + 7 * i - seq) % size for i in range(length)] for seq in seqs}
        ours: dict[int, list[Tensor]] = {seq: [] for seq in seqs}
        for step in range(3):
            windows = []
            for seq, cut in zip(seqs, cuts, strict=False):
                tokens = ids[seq][cut[step] : cut[step + 1]]
                windows.append(Window(seq, cut[step], tokens, len(tokens)))
            rows = torch.split(self.forward(windows), [window.rows for window in windows])
            for window, row in zip(windows, rows, strict=True):
                ours[window.seq].append(row)
        for seq in seqs:
            self.close(seq)
            self._model.compare(torch.cat(ours[seq]), self._tensor(ids[seq]))

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._model.device)

    def _open_unnamed(self, count: int) -> list[int]:
        """Sequences for the engine's own use; their numbers are negative, a request's are not."""
        seqs = [-1 - index for index in range(count)]
        for seq in seqs:
            self.open(seq)
        return seqs


def _passes(windows: Sequence[Window], size: int) -> Iterator[list[Window]]:
    """The windows in order, cut into passes of at most `size` tokens, so that activations are bounded."""
    batch: list[Window] = []
    room = size
    for seq, start, tokens, rows in windows:
        done, silent = 0, len(tokens) - rows
        while True:
            end = done + min(room, len(tokens) - done)
            batch.append(Window(seq, start + done, tokens[done:end], end - min(end, max(done, silent))))
            room -= end - done
            done = end
            if room == 0:
                yield batch
                batch, room = [], size
            if done == len(tokens):
                break
    if batch:
        yield batch
