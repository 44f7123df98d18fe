"""The files that drafting heads come in, brought to one set of names: our own, and the public EAGLE-3 layout.

Knows names, shapes and settings; neither devices nor arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from workers.engines.native.config import read_layer

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from ipc.messages import HeadSpec
    from workers.engines.native.config import ModelConfig

_ROPE_THETA = 10000.0
_LAYER = {
    "hidden_norm.weight": "norm_feature.weight",
    "input_layernorm.weight": "norm_embed.weight",
    "post_attention_layernorm.weight": "norm_mlp.weight",
    "self_attn.q_proj.weight": "q_proj.weight",
    "self_attn.k_proj.weight": "k_proj.weight",
    "self_attn.v_proj.weight": "v_proj.weight",
    "self_attn.o_proj.weight": "o_proj.weight",
    "mlp.gate_proj.weight": "gate_proj.weight",
    "mlp.up_proj.weight": "up_proj.weight",
    "mlp.down_proj.weight": "down_proj.weight",
}
_OUTER = {
    "fc.weight": "fuse.weight",
    "norm.weight": "norm_out.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "embedding.weight",
    "d2t": "d2t",
}
_LAYER_NAMES = ("midlayer.", "layers.0.")
_LEFT_OUT = ("t2d", "rotary_emb.inv_freq", "verifier_lm_head.weight", "verifier_norm.weight")
"""What follows from the rest, or is of the target."""


@dataclass(frozen=True, slots=True)
class HeadFile:
    """`tensors`: by our names; `output.weight` and `embedding.weight` only if the head has its own.

    `draft_to_target` is the token for each row of the output. inverse_frequencies: as of ModelConfig.
    normed_residual: what the layer adds to is the normed row, not the row.
    """

    tensors: dict[str, Tensor]
    head_dim: int
    norm_eps: float
    inverse_frequencies: npt.NDArray[np.float32]
    normed_residual: bool


def read_head(spec: HeadSpec, target: ModelConfig) -> HeadFile:
    """Raises ValueError for what is no head, OSError for what cannot be read."""
    try:
        tensors = load_file(spec.file)
    except SafetensorError as error:
        raise ValueError(f"{spec.file} is not a safetensors file: {error}") from None
    if "fc.weight" in tensors or "model.fc.weight" in tensors:
        return _eagle3(Path(spec.file), tensors, target)
    exponent = np.arange(0, target.head_dim, 2, dtype=np.float64) / target.head_dim
    frequencies = (_ROPE_THETA**-exponent).astype(np.float32)
    return HeadFile(tensors, target.head_dim, target.norm_eps, frequencies, normed_residual=False)


def _eagle3(file: Path, stored: dict[str, Tensor], target: ModelConfig) -> HeadFile:
    tensors: dict[str, Tensor] = {}
    for stored_name, tensor in stored.items():
        name = stored_name.removeprefix("model.")
        if name.endswith(_LEFT_OUT):
            continue
        layer = next((name.removeprefix(prefix) for prefix in _LAYER_NAMES if name.startswith(prefix)), "")
        ours = _LAYER.get(layer) if layer else _OUTER.get(name)
        if ours is None:
            raise ValueError(f"{file} has a tensor {stored_name}, of which no EAGLE-3 head is known here")
        tensors[ours] = tensor
    config = read_layer(file.parent)
    if not {"gate_proj.weight", "up_proj.weight"} <= tensors.keys():
        raise ValueError(f"{file} is no drafting head: it has no gate_proj and up_proj")
    gate, up = tensors.pop("gate_proj.weight"), tensors.pop("up_proj.weight")
    tensors["gate_up_proj.weight"] = torch.cat((gate, up))
    offsets = tensors.pop("d2t", None)
    count = target.vocab_size if offsets is None else len(offsets)
    ids = torch.arange(count) + (0 if offsets is None else offsets)
    rows = len(tensors["output.weight"]) if "output.weight" in tensors else count
    if len(ids) != rows or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        known = target.vocab_size
        raise ValueError(f"{file} maps {len(ids)} of its {rows} tokens to {known} of the target's")
    tensors["draft_to_target"] = ids
    return HeadFile(
        tensors, config.head_dim, config.norm_eps, config.inverse_frequencies, config.normed_residual
    )
