"""The attention that a transformers model runs in a lane in place of its own: packed windows over the KV.

A model finds `attention` under the name NAME in transformers' AttentionInterface and passes it a context, the
keyword `lane`: a Survey notes what each layer asks for and refuses what cannot be honoured; a PackedWindows
computes. This file knows nothing of checkpoints and sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch.nn import functional

from workers.blocks import blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from workers.attention import Span
    from workers.kv import PagedKV

NAME = "speclane"

_FEW_ROWS = 16
# Keywords that models hand on and that change nothing here: keys are rotated already, dropout is off.
_IGNORED = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class Form(NamedTuple):
    """How one layer attends, as its model passes it.

    scaling: factor of the scores, None for 1/sqrt(head dimension).
    sliding_window: a query sees so many keys, its own included; None for all.
    softcap: scores s become softcap * tanh(s / softcap) (Gemma 2, arXiv 2408.00118); None leaves them.
    """

    scaling: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None


class Layer(NamedTuple):
    """A layer's keys are [kv_heads, tokens, key_dim], its values [kv_heads, tokens, value_dim]."""

    kv_heads: int
    key_dim: int
    value_dim: int
    form: Form


class Context(Protocol):
    """What stands behind the keyword `lane` of a forward pass."""

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        form: Form,
        rest: dict[str, object],
    ) -> Tensor:
        """Output [tokens, heads, value_dim] for query [heads, tokens, key_dim] and new keys and values."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lane: Context | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, heads, T, D], key and value [1, kv_heads, T, D] of T packed tokens.

    Returns output [1, T, heads, value_dim] and no weights. Raises ValueError for what a lane cannot honour.
    """
    if lane is None:
        raise ValueError(f"{type(module).__name__} does not hand the lane's keywords on to its attention")
    if attention_mask is not None:
        rest["attention_mask"] = attention_mask
    form = Form(scaling, sliding_window, softcap)
    return lane.attend(module, query[0], key[0], value[0], form, rest)[None], None


class Survey:
    """Context of the first pass: notes the layers, computes nothing.

    A layer that asks for more than Form can say would decode wrongly, so the first pass refuses it.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        form: Form,
        rest: dict[str, object],
    ) -> Tensor:
        """Zeros of the output's shape. Raises ValueError naming the layer and what it asks for."""
        index = getattr(module, "layer_idx", None)
        name = f"{type(module).__name__} (layer {index})"
        if not isinstance(index, int) or index in self.layers:
            raise ValueError(f"{name} has no layer index of its own, by which its keys could be found again")
        if rest.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise ValueError(f"{name} looks at later tokens; only causal self-attention can be served")
        # Even if it is None for this pass: sparse attention, say, sets in only beyond some length.
        if unknown := sorted(rest.keys() - _IGNORED):
            raise ValueError(f"{name} may ask for {', '.join(unknown)}, which a lane's attention has not")
        if key.shape[1] != query.shape[1] or query.shape[0] % key.shape[0] != 0:
            raise ValueError(
                f"{name} has queries {[*query.shape]} and keys {[*key.shape]} of other tokens or heads"
            )
        self.layers[index] = Layer(key.shape[0], key.shape[2], value.shape[2], form)
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[2])


class PackedWindows:
    """Context of a pass over spans of sequences, packed one behind the other.

    `kv` has at least the heads and head dimension of every layer. New keys and values are written to their
    positions first; then each span attends over the prefix of its own sequence.
    """

    def __init__(self, spans: Sequence[Span], kv: PagedKV) -> None:
        self._spans = spans
        self._kv = kv
        seqs = [span.seq for span in spans for _ in range(span.length)]
        positions = [position for span in spans for position in range(span.start, span.start + span.length)]
        self._places = kv.places(seqs, positions)
        self._pieces = [kv.pieces([span.seq], blocks_for(span.start + span.length)) for span in spans]
        self._masks: dict[tuple[Span, int, int | None], Tensor] = {}

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        form: Form,
        rest: dict[str, object],
    ) -> Tensor:
        """See Context."""
        index = int(module.layer_idx)  # type: ignore[arg-type]
        self._kv.write(index, self._rows(key, value), self._places)
        out = query.new_empty(query.shape[1], query.shape[0], value.shape[2])
        at = 0
        for span, pieces in zip(self._spans, self._pieces, strict=True):
            rows = slice(at, at + span.length)
            end = span.start + span.length
            keys, values = self._kv.read(index, pieces, 1, query.dtype)
            keys, values = (
                keys[: len(key), :end, : key.shape[2]],
                values[: len(value), :end, : value.shape[2]],
            )
            out[rows] = self._one(query[:, rows], keys, values, span, form).transpose(0, 1)
            at += span.length
        return out

    def _rows(self, key: Tensor, value: Tensor) -> Tensor:
        """As the storage takes them: a layer may have fewer heads or dimensions than others."""
        rows = key.new_zeros(key.shape[1], 2, self._kv.kv_heads, self._kv.head_dim)
        for side, heads in enumerate((key, value)):
            rows[:, side, : len(heads), : heads.shape[2]] = heads.transpose(0, 1)
        return rows.flatten(1, 2)

    def _one(self, query: Tensor, keys: Tensor, values: Tensor, span: Span, form: Form) -> Tensor:
        """Output [heads, rows, value_dim] of one span.

        Query heads that share keys become rows of one product, which is fastest for few rows; for many rows
        they stay apart, so that the mask need not be repeated.
        """
        heads, rows, _ = query.shape
        apart = heads // keys.shape[0] if rows > _FEW_ROWS else 1
        repeats = heads // keys.shape[0] // apart
        first = 0 if form.sliding_window is None else max(0, span.start + 1 - form.sliding_window)
        attended = _attend(
            query.reshape(keys.shape[0], apart, -1, query.shape[2]),
            keys[:, None, first:].expand(-1, apart, -1, -1),
            values[:, None, first:].expand(-1, apart, -1, -1),
            self._mask(span, first, form.sliding_window, repeats, query.dtype),
            form,
        )
        return attended.reshape(heads, rows, values.shape[2])

    def _mask(
        self, span: Span, first: int, sliding_window: int | None, repeats: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Additive mask [repeats * rows, keys from `first` on]; None where a lone query sees all of them."""
        if span.length == 1:
            return None
        name = (span, repeats, sliding_window)
        if name not in self._masks:
            device = self._kv.device
            end = span.start + span.length
            position = torch.arange(span.start, end, device=device)[:, None]
            seen = torch.arange(first, end, device=device)[None]
            hidden = seen > position
            if sliding_window is not None:
                hidden |= seen <= position - sliding_window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
            self._masks[name] = mask.repeat(repeats, 1)
        return self._masks[name]


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, form: Form) -> Tensor:
    """Scaled dot product of query [kv_heads, apart, rows, D]; spelt out where torch's has no softcap."""
    if form.softcap is None:
        return functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, scale=form.scaling
        )
    scaling = query.shape[-1] ** -0.5 if form.scaling is None else form.scaling
    scores = torch.tanh(torch.matmul(query, keys.transpose(-1, -2)) * (scaling / form.softcap)) * form.softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)
