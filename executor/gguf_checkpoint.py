"""A GGUF file of the llama architecture made into a Hugging Face checkpoint directory, weights in bfloat16.

It owns the meaning of GGUF names, of llama.cpp's row order and of its tokenizer fields. It must not know
where files come from or where they are kept.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from executor import safetensors_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

_CONTROL = 3
_USER_DEFINED = 4

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


class _Fields(dict[str, Any]):
    """The metadata of a GGUF file; reading a key that is not there is the file's fault."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"GGUF file has no {key}, which a llama checkpoint needs")


def convert(source: Path, destination: Path) -> None:
    """Write config, weights, tokenizer and generation defaults of a GGUF file into a directory that exists.

    Raises ValueError, in one line, for what it cannot convert faithfully; OSError for what it cannot write.
    """
    reader = gguf.GGUFReader(source)
    fields = _Fields({name: field.contents() for name, field in reader.fields.items()})
    config = _config(fields, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = [_tensor(tensor, *heads) for tensor in reader.tensors]
    tokenizer, tokenizer_config = _tokenizer(fields)
    generation: dict[str, Any] = {"_from_model_config": True}
    generation |= {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    for name, content in (
        ("config.json", config),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", generation),
    ):
        (destination / name).write_text(
            json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    (destination / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    safetensors_file.write(destination / "model.safetensors", tensors)


def round_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 of each float32, ties to even; NaN stays NaN, overflow becomes infinite.

    bfloat16 is the upper half of a float32: adding 0x7FFF, and one more if the kept half is odd, carries into
    it exactly when the dropped half is above its middle, or on it with an odd kept half.
    """
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows [heads · d, …] of a query or key projection from llama.cpp's order back to the checkpoint's.

    llama.cpp rotates neighbouring pairs (2i, 2i+1) of a head, Hugging Face the pairs (i, i + d/2), so its
    converter interleaves the two halves of every head.
    """
    half = rows.shape[0] // heads // 2
    pairs = rows.reshape(heads, half, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _config(fields: _Fields, *, tied: bool) -> dict[str, Any]:
    _check_plain(fields)
    heads = int(fields["llama.attention.head_count"])
    hidden = int(fields["llama.embedding_length"])
    rope_theta = _shortest(fields.get("llama.rope.freq_base", 10000.0))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "head_dim": int(fields.get("llama.attention.key_length", hidden // heads)),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(fields["llama.context_length"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        # Readers before transformers 5 know only `rope_theta`, later ones prefer `rope_parameters`.
        "rope_theta": rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": tied,
        "use_cache": True,
        "bos_token_id": _token_id(fields, "bos_token_id"),
        "eos_token_id": _token_id(fields, "eos_token_id"),
        "pad_token_id": _token_id(fields, "padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def _check_plain(fields: _Fields) -> None:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"GGUF architecture {architecture!r} cannot be converted; 'llama' can")
    if any(name.startswith("llama.rope.scaling.") for name in fields) or "llama.expert_count" in fields:
        raise ValueError("GGUF files with rotary scaling or experts cannot be converted; plain llama can")
    head_dim = fields.get(
        "llama.attention.key_length",
        fields["llama.embedding_length"] // fields["llama.attention.head_count"],
    )
    rotated = fields.get("llama.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ValueError(
            f"GGUF files that rotate {rotated} of {head_dim} dimensions cannot be converted; all can"
        )


def _shortest(value: float) -> float:
    """GGUF keeps float32: the shortest decimal that means the same one is the number somebody wrote."""
    return float(str(np.float32(value)))


def _token_id(fields: _Fields, name: str) -> int | None:
    value = fields.get(f"tokenizer.ggml.{name}")
    return None if value is None else int(value)


def _tensor(tensor: Any, heads: int, kv_heads: int) -> safetensors_file.Tensor:
    name = _tensor_name(tensor.name)
    shape = tuple(int(n) for n in reversed(tensor.shape))

    def pieces() -> Iterator[bytes]:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if ".q_proj." in name or ".k_proj." in name:
            values = unpermute(values, heads if ".q_proj." in name else kv_heads)
        yield round_to_bfloat16(values).tobytes()

    return safetensors_file.Tensor(name, "BF16", shape, 2 * int(np.prod(shape)), pieces)


def _tensor_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    if (match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)) and match[2] in _BLOCK_TENSORS:
        return f"model.layers.{match[1]}.{_BLOCK_TENSORS[match[2]]}.weight"
    raise ValueError(f"GGUF tensor {name!r} has no place in a llama checkpoint")


def _tokenizer(fields: _Fields) -> tuple[Tokenizer, dict[str, Any]]:
    """The byte-level BPE tokenizer of the file, and the content of its tokenizer_config.json."""
    kind, split = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in ("smollm", "gpt-2"):
        raise ValueError(
            f"GGUF tokenizer {kind!r} with split {split!r} cannot be converted; 'gpt2' with 'smollm' can"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bytes_split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [pre_tokenizers.Digits(individual_digits=True)] if split == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, bytes_split])
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            # One by one: only the order of the calls keeps their ids.
            tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False)])
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; the model's own class would rebuild the splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(fields["llama.context_length"]),
    }
    for key, name in _SPECIAL_TOKENS.items():
        if (token_id := _token_id(fields, name)) is not None:
            config[key] = tokens[token_id]
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return tokenizer, config
