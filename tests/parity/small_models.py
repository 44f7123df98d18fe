"""Small random checkpoints of every family that the native engine runs, made by transformers itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

from ipc.messages import LaneSpec

if TYPE_CHECKING:
    from pathlib import Path

COMMON = {
    "vocab_size": 211,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

FAMILIES = {
    "llama": ("Llama", {}),
    "llama, tied": ("Llama", {"tie_word_embeddings": True}),
    "llama, one KV head": ("Llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-3}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama 3": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral, sliding window": ("Mistral", {"sliding_window": 9}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}


def save(directory: Path, family: str, *, dtype: torch.dtype = torch.float32, **changes: object) -> Path:
    """Write the checkpoint; norms and biases, which start as ones and zeros, are random like the weights."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **changes})
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            around = 1.0 if parameter.dim() == 1 and parameter.mean() == 1 else 0.0
            parameter.normal_(around, 0.1)
    model.to(dtype).save_pretrained(directory)
    return directory


def lane(directory: Path, *, dtype: str = "fp32", slots: int = 8, threads: int = 1) -> LaneSpec:
    return LaneSpec("target", "native", str(directory), dtype, "cpu", threads, slots, 0)  # type: ignore[arg-type]
