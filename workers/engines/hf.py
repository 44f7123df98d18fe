"""The `hf` engine: any decoder-only transformers model whose attention goes through AttentionInterface.

It proves before it serves that windows over paged KV give the logits of transformers' own attention: what
would decode wrongly is refused. It knows no architecture; what engines have in common is in
`workers.engines.paged`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.blocks import BlockPool, blocks_for
from workers.engines.engine import Window
from workers.engines.hf_attention import PackedWindows
from workers.engines.hf_model import HfModel
from workers.engines.paged import Form, PagedEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ipc.messages import LaneSpec
    from workers.engines.paged import Pass
    from workers.kv import PagedKV

PASS_TOKENS = 512
_PROOF_TOKENS = 24
_NOTE = (
    "hf engine: the last bits of a logit depend on what else is in the batch, so where two tokens are nearly "
    "equal the text may depend on speculation; on the CPU the native engine's does not"
)


class HfEngine(PagedEngine):
    """See PagedEngine."""

    def __init__(self, spec: LaneSpec) -> None:
        super().__init__(spec)
        if self._vocabulary.size != self._model.vocabulary_size:
            raise self._model.refusal(
                f"it has {self._model.vocabulary_size} logits for a vocabulary of {self._vocabulary.size}"
            )

    @torch.inference_mode()
    def set_up_attention(self) -> None:
        """Two sequences in uneven, packed windows must give the logits that transformers has for each alone.

        This finds what a model does beside its attention calls: state in other layers, masks or biases of its
        own, positions taken from the place in the batch. Raises ValueError.
        """
        length = min(_PROOF_TOKENS, self.max_model_len)
        cuts = ([0, length // 3, length // 3 + 1, length], [0, length // 2, length - length // 8, length])
        self._make_kv(BlockPool(2 * blocks_for(length), reuse=False))
        seqs = self._open_unnamed(min(2, self._spec.max_sequences))
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
            self._model.compare(torch.cat(ours[seq]), self._tensor(ids[seq]))

    def _load(self) -> Form:
        self._model = HfModel(self._spec)
        layers = self._model.layers
        form = Form(
            self._model.max_model_len(self._spec.max_model_len),
            PASS_TOKENS,
            len(layers),
            max(layer.kv_heads for layer in layers),
            max(max(layer.key_dim, layer.value_dim) for layer in layers),
            self._model.dtype,
        )
        self._notes += [_NOTE, *self._model.notes]
        return form

    def _attach(self, kv: PagedKV) -> None:
        """Each pass is handed the storage."""

    def _run(self, part: Pass) -> Tensor:
        """Logits."""
        lane = PackedWindows(part.spans, self._kv)
        ids, positions, wanted = (self._tensor(x) for x in (part.tokens, part.positions, part.wanted))
        return self._model.logits(ids, positions, wanted, lane)

    def _logits(self, rows: Tensor) -> Tensor:
        return rows

    def _tensor(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)
