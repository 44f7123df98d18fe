"""What the hf engine must refuse at load, or bound, because it would decode wrongly."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from small_hf_models import CONTEXT, FAMILIES, GROUPED, SLIDING, save, spec

from workers.engines import hf_attention, hf_model
from workers.engines.hf import HfEngine
from workers.lifecycle import made_ready

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

REFUSED: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    "own attention with ALiBi": (
        lambda: transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=3, n_head=4),
        "BloomForCausalLM: 0 of its 3 layers attend",
    ),
    "state space": (
        lambda: transformers.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=3),
        "MambaForCausalLM: it has layers of type linear_attention",
    ),
    "attention sinks": (
        lambda: transformers.GptOssConfig(**SLIDING, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "GptOssForCausalLM: .* may ask for s_aux",
    ),
    "layers of another type": (
        lambda: transformers.Lfm2Config(**GROUPED, layer_types=["full_attention", "conv", "full_attention"]),
        "Lfm2ForCausalLM: it has layers of type conv",
    ),
    "chunked attention": (
        lambda: transformers.Llama4TextConfig(
            **GROUPED, intermediate_size_mlp=48, head_dim=8, num_local_experts=2, attention_chunk_size=64
        ),
        "Llama4ForCausalLM: it has layers of type chunked_attention",
    ),
    "keywords swallowed": (
        lambda: transformers.StableLmConfig(**GROUPED),
        "StableLmAttention does not hand the lane's keywords on",
    ),
    "bidirectional": (
        lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, use_bidirectional_attention=True),
        "Gemma3ForCausalLM: .* looks at later tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_architecture_that_would_decode_wrongly_is_refused(tmp_path: Path, name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=message) as refused:
        made_ready(HfEngine(spec(save(config(), tmp_path))))
    assert "\n" not in str(refused.value)
    assert "choose a decoder-only model" in str(refused.value)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot load .*T5Config") as refused:
        made_ready(HfEngine(spec(tmp_path)))
    assert "\n" not in str(refused.value)


def test_the_proof_finds_a_wrong_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr(hf_attention.PackedWindows, "_mask", lambda *_: None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: .* off transformers' own"):
        made_ready(HfEngine(spec(tmp_path)))


def test_the_proof_finds_positions_that_the_model_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(FAMILIES["llama"](), tmp_path)
    rotate = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward

    def by_place(self, x, position_ids):
        return rotate(self, x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding, "forward", by_place)
    with pytest.raises(ValueError, match="off transformers' own"):
        made_ready(HfEngine(spec(tmp_path)))


def test_a_context_that_cannot_be_served_names_one_that_can(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    with pytest.raises(ValueError, match=r"max_model_len 97 .* use at most 96"):
        made_ready(HfEngine(spec(tmp_path, max_model_len=CONTEXT + 1)))


def test_longrope_ends_where_it_would_depend_on_the_batch(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = transformers.Phi3Config(**GROUPED, original_max_position_embeddings=32, rope_parameters=rope)
    save(config, tmp_path)
    engine = made_ready(HfEngine(spec(tmp_path)))
    assert engine.max_model_len == 32
    assert any("limited to 32 tokens" in note for note in engine.notes)
    with pytest.raises(ValueError, match=r"longrope .* use at most 32"):
        made_ready(HfEngine(spec(tmp_path, max_model_len=33)))


def test_a_sliding_window_that_is_not_passed_bounds_the_context(tmp_path: Path) -> None:
    config = transformers.PhimoeConfig(**SLIDING, num_local_experts=2, num_experts_per_tok=1)
    save(config, tmp_path)
    engine = made_ready(HfEngine(spec(tmp_path)))
    assert engine.max_model_len == 6
    with pytest.raises(ValueError, match=r"sliding window .* use at most 6"):
        made_ready(HfEngine(spec(tmp_path, max_model_len=7)))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"has 9 missing weights, as model\.layers\.3\."):
        made_ready(HfEngine(spec(tmp_path)))


def test_weights_that_are_not_used_are_noted(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    notes = made_ready(HfEngine(spec(tmp_path))).notes
    assert any(
        note.startswith("9 weights of the checkpoint are not used, as model.layers.2.") for note in notes
    )


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        made_ready(HfEngine(spec(tmp_path)))


@pytest.mark.parametrize("version", ["5.25.0", "5.2.4", "4.57.1", "6.24.0"])
def test_another_transformers_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=rf"transformers>=5\.24,<5\.25, found {version}"):
        hf_model.check_version(version)
