"""Small random checkpoints of the families that the hf engine serves, made on the spot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import transformers

from ipc.messages import LaneSpec

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CONTEXT = 96
SLOTS = 4

COMMON = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = COMMON | {"num_key_value_heads": 2}
SLIDING = GROUPED | {"sliding_window": 6}
EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}

FAMILIES: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": lambda: transformers.LlamaConfig(**GROUPED),
    "qwen2": lambda: transformers.Qwen2Config(**SLIDING, use_sliding_window=True, max_window_layers=1),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=16),
    "mistral, sliding": lambda: transformers.MistralConfig(**SLIDING),
    "gemma2, softcap and sliding": lambda: transformers.Gemma2Config(
        **SLIDING, head_dim=16, attn_logit_softcapping=2.0
    ),
    "gemma3, two rotations": lambda: transformers.Gemma3TextConfig(
        **SLIDING, head_dim=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gemma4, heads of two sizes": lambda: transformers.Gemma4TextConfig(
        **SLIDING,
        head_dim=8,
        global_head_dim=16,
        layer_types=["sliding_attention", "full_attention", "full_attention"],
        vocab_size_per_layer_input=COMMON["vocab_size"],
        hidden_size_per_layer_input=8,
        num_kv_shared_layers=1,
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**COMMON),
    "phi": lambda: transformers.PhiConfig(**GROUPED),
    "gpt2, learned positions": lambda: transformers.GPT2Config(
        vocab_size=101,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=CONTEXT,
        bos_token_id=None,
        eos_token_id=None,
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**GROUPED, **EXPERTS, head_dim=8, num_experts=4),
    "deepseek-v3, values narrower than keys": lambda: transformers.DeepseekV3Config(
        **COMMON,
        **LATENT,
        **EXPERTS,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def save(config: transformers.PreTrainedConfig, directory: Path) -> Path:
    """A random checkpoint whose logits depend visibly on every token of the prefix."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(directory)
    return directory


def spec(
    directory: Path, dtype: str = "fp32", max_sequences: int = SLOTS, max_model_len: int = 0
) -> LaneSpec:
    return LaneSpec("target", "hf", str(directory), dtype, "cpu", 1, max_sequences, max_model_len)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, COMMON["vocab_size"], (count,), generator=generator).tolist()
