"""A model's architecture as its config.json tells it; what is not supported is refused here.

Knows the names and defaults of the fields; neither tensors nor files of weights.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder-only transformer with rotary positions, RMS norms and a gated SiLU network.

    `inverse_frequencies`: float32 [head_dim / 2], radians per position. `sliding_window`: keys that a query
    sees at most, its own included; 0 is all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    tied: bool
    query_key_norm: bool
    sliding_window: int
    inverse_frequencies: npt.NDArray[np.float32]


class _Fields:
    """The object in config.json, read with checks that name field, value and what would work."""

    def __init__(self, path: Path, part: dict[str, Any] | None = None) -> None:
        """`part`: an object of the file, instead of the whole."""
        self._path = path
        self._content: dict[str, Any]
        if part is not None:
            self._content = part
            return
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
        if not isinstance(content, dict):
            raise ValueError(f"{path} holds no JSON object")
        self._content = content

    def get(self, name: str, default: Any = None) -> Any:
        value = self._content.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refuse(name, value, "a whole number above 0")
        return value

    def number(self, name: str, default: float | None, within: dict[str, Any] | None = None) -> float:
        value = self.get(name, default) if within is None else within.get(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise self.refuse(name, value, "a number above 0")
        return float(value)

    def refuse(self, name: str, value: Any, works: str) -> ValueError:
        return ValueError(f"{self._path}: {name} is {value!r}; the native engine supports {works}")


def read_config(directory: Path) -> ModelConfig:
    """Raises OSError if there is no config.json, ValueError naming a field that cannot be served."""
    fields = _Fields(directory / "config.json")
    architecture = _architecture(fields)
    _refuse_unsupported(fields)
    hidden_size, query_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", query_heads)
    if query_heads % kv_heads:
        raise fields.refuse(
            "num_key_value_heads", kv_heads, f"divisors of num_attention_heads, {query_heads}"
        )
    # Qwen3's default is a number of its own, all others divide the hidden size.
    head_dim = fields.count(
        "head_dim", 128 if architecture.startswith("Qwen3") else hidden_size // query_heads
    )
    if head_dim % 2:
        raise fields.refuse("head_dim", head_dim, "even numbers")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        layers=fields.count("num_hidden_layers"),
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        context=fields.count("max_position_embeddings"),
        tied=bool(fields.get("tie_word_embeddings", False)),
        query_key_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_window(fields, architecture),
        inverse_frequencies=_inverse_frequencies(fields, head_dim),
    )


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What a single decoder layer that is no model says of itself; see ModelConfig.

    `normed_residual`: its field norm_before_residual.
    """

    head_dim: int
    norm_eps: float
    inverse_frequencies: npt.NDArray[np.float32]
    normed_residual: bool


def read_layer(directory: Path) -> LayerConfig:
    """Of a head in the public EAGLE-3 layout, whose layer's fields may stand in an object of their own.

    Raises as `read_config`.
    """
    outer = _Fields(directory / "config.json")
    inner = outer.get("transformer_layer_config")
    fields = _Fields(directory / "config.json", inner) if isinstance(inner, dict) else outer
    query_heads = fields.count("num_attention_heads")
    head_dim = fields.count("head_dim", fields.count("hidden_size") // query_heads)
    return LayerConfig(
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        inverse_frequencies=_inverse_frequencies(fields, head_dim),
        normed_residual=bool(outer.get("norm_before_residual", False)),
    )


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures", [])
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    if name not in ARCHITECTURES:
        raise fields.refuse("architectures", names, f"one of {', '.join(ARCHITECTURES)}; try the hf engine")
    return str(name)


def _sliding_window(fields: _Fields, architecture: str) -> int:
    # Qwen files carry the field for a feature that they switch off, which has been checked.
    if architecture != "MistralForCausalLM" or fields.get("sliding_window") is None:
        return 0
    return fields.count("sliding_window")


def _refuse_unsupported(fields: _Fields) -> None:
    supported: dict[str, tuple[Any, ...]] = {
        "hidden_act": ("silu",),
        "partial_rotary_factor": (1, None),
        "quantization_config": (None,),
        "use_sliding_window": (False, None),
        "pretraining_tp": (1, None),
    }
    for name, values in supported.items():
        value = fields.get(name, "silu" if name == "hidden_act" else None)
        if value not in values:
            raise fields.refuse(name, value, f"{values[0]!r} only; try the hf engine")
    kinds = fields.get("layer_types", [])
    if any(kind not in ("full_attention", "sliding_attention") for kind in kinds) or len(set(kinds)) > 1:
        raise fields.refuse("layer_types", kinds, "one kind of attention in all layers; try the hf engine")


def _inverse_frequencies(fields: _Fields, head_dim: int) -> npt.NDArray[np.float32]:
    """1 / theta^(2i / head_dim) in float32, rescaled as the rope type says (see `_stretch`).

    Newer files keep all in `rope_parameters`; older ones have `rope_theta` beside an optional `rope_scaling`.
    """
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise fields.refuse("rope_parameters", rope, "an object with rope_type and rope_theta")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise fields.refuse("rope_type", kind, f"{', '.join(_ROPE_TYPES)}; try the hf engine")
    if rope.get("partial_rotary_factor", 1) != 1:
        raise fields.refuse(
            "partial_rotary_factor", rope["partial_rotary_factor"], "1 only; try the hf engine"
        )
    theta = rope.get("rope_theta", fields.get("rope_theta", 10000.0))
    theta = fields.number("rope_theta", None, {"rope_theta": theta})
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    plain = (1.0 / np.power(np.float64(theta), exponent.astype(np.float64))).astype(np.float32)
    if kind == "default":
        return plain
    factor = fields.number("factor", None, rope)
    if kind == "linear":
        return plain / np.float32(factor)
    low, high = fields.number("low_freq_factor", 1.0, rope), fields.number("high_freq_factor", 4.0, rope)
    context = fields.number("original_max_position_embeddings", None, rope)
    return _stretch(plain, factor, low, high, context)


def _stretch(
    plain: npt.NDArray[np.float32], factor: float, low: float, high: float, context: float
) -> npt.NDArray[np.float32]:
    """Llama 3.1's rescaling: frequencies with fewer than `low` turns in `context` are divided by `factor`,
    those with more than `high` are kept, and between the two the kept part grows linearly with the turns."""
    turns = context * plain.astype(np.float64) / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (plain * (kept + (1.0 - kept) / factor)).astype(np.float32)
