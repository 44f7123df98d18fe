from __future__ import annotations

import json

import gguf
import numpy as np
import pytest
import safetensors
import tiny_gguf
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from executor.gguf_checkpoint import convert, round_to_bfloat16, unpermute


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    convert(tiny_gguf.write(tmp_path / "tiny.gguf"), directory)
    return directory


def _load(directory):
    with safetensors.safe_open(directory / "model.safetensors", "pt") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@settings(derandomize=True, max_examples=200)
@given(st.lists(st.floats(width=32), min_size=1, max_size=50))
def test_rounding_is_torchs(values):
    floats = np.array(values, np.float32)
    ours = torch.from_numpy(round_to_bfloat16(floats).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours.nan_to_num(7), torch.from_numpy(floats).bfloat16().nan_to_num(7))
    assert torch.equal(ours.isnan(), torch.from_numpy(np.isnan(floats)))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F80),  # a tie above an even half stays
        (0x3F818000, 0x3F82),  # a tie above an odd half goes up
        (0x3F808001, 0x3F81),
        (0x3F807FFF, 0x3F80),
        (0x7F7FFFFF, 0x7F80),  # the largest float32 becomes infinite
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN with its payload in the dropped half stays a NaN
        (0x80000001, 0x8000),
    ],
)
def test_rounding_at_its_edges(bits, expected):
    assert round_to_bfloat16(np.array([bits], np.uint32).view(np.float32))[0] == expected


def test_unpermute_separates_the_interleaved_halves_of_every_head():
    heads, dim = 3, 8
    rows = np.arange(heads * dim, dtype=np.float32)[:, None] * np.ones((1, 5), np.float32)
    found = unpermute(rows, heads)
    for head in range(heads):
        for pair in range(dim // 2):
            assert found[head * dim + pair, 0] == head * dim + 2 * pair
            assert found[head * dim + dim // 2 + pair, 0] == head * dim + 2 * pair + 1


def test_config(checkpoint):
    assert json.loads((checkpoint / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(tiny_gguf.TOKENS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == 2


def test_weights_are_bf16_under_their_hugging_face_names(checkpoint):
    metadata, weights = _load(checkpoint)
    source = {name: torch.from_numpy(values) for name, values in tiny_gguf.tensors().items()}
    assert metadata == {"format": "pt"}
    assert len(weights) == len(source)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    for theirs, ours in (
        ("token_embd", "model.embed_tokens"),
        ("output_norm", "model.norm"),
        ("blk.1.attn_norm", "model.layers.1.input_layernorm"),
        ("blk.1.attn_v", "model.layers.1.self_attn.v_proj"),
        ("blk.1.attn_output", "model.layers.1.self_attn.o_proj"),
        ("blk.1.ffn_norm", "model.layers.1.post_attention_layernorm"),
    ):
        assert torch.equal(weights[f"{ours}.weight"], source[f"{theirs}.weight"].bfloat16())
    for theirs, ours, heads in (("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)):
        expected = unpermute(source[f"blk.0.{theirs}.weight"].numpy(), heads)
        found = weights[f"model.layers.0.self_attn.{ours}.weight"]
        assert torch.equal(found, torch.from_numpy(expected.copy()).bfloat16())


def test_quantised_weights_are_dequantised(checkpoint):
    _, weights = _load(checkpoint)
    kind = gguf.GGMLQuantizationType.Q8_0
    for part in ("gate", "up", "down"):
        values = tiny_gguf.tensors()[f"blk.1.ffn_{part}.weight"]
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind)).bfloat16()
        assert torch.equal(weights[f"model.layers.1.mlp.{part}_proj.weight"], expected)


def test_untied_output_is_kept(tmp_path):
    convert(tiny_gguf.write(tmp_path / "untied.gguf", tied=False), tmp_path)
    _, weights = _load(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    expected = torch.from_numpy(tiny_gguf.tensors(tied=False)["output.weight"]).bfloat16()
    assert torch.equal(weights["lm_head.weight"], expected)


def test_tokenizer(checkpoint):
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids = {token: i for i, token in enumerate(tiny_gguf.TOKENS)}
    assert tokenizer.get_vocab() == ids
    assert tokenizer.encode("<|im_start|>the the  12<|im_end|>").ids == [
        *(ids[t] for t in ("<|im_start|>", "t", "he", "Ġthe", "ĠĠ", "1", "2", "<|im_end|>"))
    ]
    assert tokenizer.decode(tokenizer.encode("é 日本 the").ids) == "é 日本 the"
    added = tokenizer.get_added_tokens_decoder()
    assert {i: (token.content, token.special) for i, token in added.items()} == {
        i: (token, True) for i, token in enumerate(tiny_gguf.SPECIAL)
    }


def test_tokenizer_config(checkpoint):
    assert json.loads((checkpoint / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 128,
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
        "chat_template": tiny_gguf.TEMPLATE,
    }


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architecture": "gemma"}, "'gemma'"),
        ({"pre": "llama-bpe"}, "'llama-bpe'"),
        ({"rope_scaling": 2.0}, "rotary scaling"),
        ({"rotated": 4}, "rotate 4 of 8 dimensions"),
        ({"tensors": ["blk.0.attn_q.bias"]}, "'blk.0.attn_q.bias'"),
    ],
)
def test_what_cannot_be_converted_is_refused(tmp_path, change, named):
    with pytest.raises(ValueError, match=named) as raised:
        convert(tiny_gguf.write(tmp_path / "other.gguf", **change), tmp_path)
    assert "\n" not in str(raised.value)


def test_a_missing_setting_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "bare.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"has no llama\.embedding_length,"):
        convert(tmp_path / "bare.gguf", tmp_path)
