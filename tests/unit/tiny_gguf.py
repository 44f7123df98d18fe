"""A GGUF file of a random llama with a byte-level tokenizer, small enough to make in every test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS = 32, 64, 4, 2, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "Ġ Ġ"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


def tensors(tied: bool = True) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """By GGUF name, rows first."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd": (len(TOKENS), HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (len(TOKENS), HIDDEN)
    for i in range(LAYERS):
        shapes |= {f"blk.{i}.attn_norm": (HIDDEN,), f"blk.{i}.ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{i}.attn_q": (HIDDEN, HIDDEN), f"blk.{i}.attn_k": (kv, HIDDEN)}
        shapes |= {f"blk.{i}.attn_v": (kv, HIDDEN), f"blk.{i}.attn_output": (HIDDEN, HIDDEN)}
        shapes |= {f"blk.{i}.ffn_gate": (INNER, HIDDEN), f"blk.{i}.ffn_up": (INNER, HIDDEN)}
        shapes |= {f"blk.{i}.ffn_down": (HIDDEN, INNER)}
    random = np.random.default_rng(7)
    return {f"{name}.weight": random.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(
    path: Path, *, tied: bool = True, architecture: str = "llama", pre: str = "smollm", **extra: Any
) -> Path:
    """Matrices of the feed-forward as Q8_0, everything else as float32.

    extra: settings and tensors that make the file unusual.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if extra.get("rope_scaling"):
        writer.add_rope_scaling_factor(extra["rope_scaling"])
    if extra.get("rotated"):
        writer.add_rope_dimension_count(extra["rotated"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    kinds = gguf.GGMLQuantizationType
    for name, values in tensors(tied).items():
        if ".ffn_" in name and values.ndim == 2:
            writer.add_tensor(name, gguf.quantize(values, kinds.Q8_0), raw_dtype=kinds.Q8_0)
        else:
            writer.add_tensor(name, values)
    for name in extra.get("tensors", ()):
        writer.add_tensor(name, np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
