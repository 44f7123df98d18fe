"""Heads in the public EAGLE-3 layout: small random ones, and the layer written down again in plain torch."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from small_models import lane, save

from executor import eagle3
from executor.checkpoint import check_directory
from executor.config import Config
from executor.errors import InvalidConfig
from executor.model import prepare, speculator_spec
from ipc.messages import LaneSpec
from workers.engines.engine import Window
from workers.engines.native import NativeEngine
from workers.engines.tap import Tap
from workers.lifecycle import made_ready
from workers.speculators.head import Entry, Head, Read
from workers.tensor_plane import TensorPlane

if TYPE_CHECKING:
    from pathlib import Path

HIDDEN, VOCABULARY, DRAFTED = 96, 211, 50
HEADS, KV_HEADS, HEAD_DIM, INNER = 4, 2, 32, 64
LAYERS = 6
EPSILON = 1e-5
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": EPSILON,
    "rope_theta": 500000.0,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": DRAFTED,
    "max_position_embeddings": 256,
}


def tensors(*, fc: int = 3 * HIDDEN) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, around: float = 0.0) -> torch.Tensor:
        return around + 0.1 * torch.randn(*shape, generator=generator)

    heads, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    targets = torch.arange(DRAFTED) * 4 + 1
    seen = torch.zeros(VOCABULARY, dtype=torch.bool)
    seen[targets] = True
    return {
        "fc.weight": random(HIDDEN, fc),
        "midlayer.hidden_norm.weight": random(HIDDEN, around=1.0),
        "midlayer.input_layernorm.weight": random(HIDDEN, around=1.0),
        "midlayer.post_attention_layernorm.weight": random(HIDDEN, around=1.0),
        "midlayer.self_attn.q_proj.weight": random(heads, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(kv, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(kv, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, heads),
        "midlayer.mlp.gate_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, INNER),
        "norm.weight": random(HIDDEN, around=1.0),
        "lm_head.weight": random(DRAFTED, HIDDEN),
        "d2t": targets - torch.arange(DRAFTED),
        "t2d": seen,
    }


def write(directory: Path, weights: dict[str, torch.Tensor], **settings: object) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(weights, directory / eagle3.FILE)
    config = {name: value for name, value in (CONFIG | settings).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def target(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("target")
    return save(directory, request.param, num_hidden_layers=LAYERS, vocab_size=VOCABULARY)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def turn(x: torch.Tensor, theta: float = 500000.0) -> torch.Tensor:
    """Rotary positions 0, 1, … of [n, heads, head_dim], the two halves of a head being one number's parts."""
    frequencies = theta ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def reference(w, rows, embedded, *, normed_residual: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, 3 · hidden] of positions 0 …, embeddings of the tokens after them → last row, its logits."""
    x = rows @ w["fc.weight"].T
    normed = norm(x, w["midlayer.hidden_norm.weight"])
    joined = torch.cat((norm(embedded, w["midlayer.input_layernorm.weight"]), normed), dim=-1)
    q, k, v = (joined @ w[f"midlayer.self_attn.{name}_proj.weight"].T for name in "qkv")
    q, k = turn(q.view(-1, HEADS, HEAD_DIM)), turn(k.view(-1, KV_HEADS, HEAD_DIM))
    k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (k, v.view(-1, KV_HEADS, HEAD_DIM)))
    attended = F.scaled_dot_product_attention(
        *(part.transpose(0, 1)[None] for part in (q, k, v)), is_causal=True
    )[0].transpose(0, 1)
    x = (normed if normed_residual else x) + attended.reshape(len(x), -1) @ w[
        "midlayer.self_attn.o_proj.weight"
    ].T
    h = norm(x, w["midlayer.post_attention_layernorm.weight"])
    gate, up = (h @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    x = x + (F.silu(gate) * up) @ w["midlayer.mlp.down_proj.weight"].T
    return x[-1], norm(x[-1], w["norm.weight"]) @ w["lm_head.weight"].T


def spec_of(directory: Path, target: Path):
    settings = json.loads((target / "config.json").read_text())
    return eagle3.head_spec(directory, lane(target), settings, "speculator")


def spelt_otherwise(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{name.replace('midlayer.', 'layers.0.')}": tensor for name, tensor in weights.items()}


NESTED = {"architectures", "speculators_model_type", "draft_vocab_size"}
SPELLINGS = {
    "flat": ({}, lambda weights: weights),
    "nested": (
        {
            **dict.fromkeys(CONFIG.keys() - NESTED),
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {k: v for k, v in CONFIG.items() if k not in NESTED},
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 6],
        },
        spelt_otherwise,
    ),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_it_drafts_as_the_layer_is_written_down(target, tmp_path, spelling):
    """From the engine's rows to the head's logits, for the whole text and step by step."""
    settings, rename = SPELLINGS[spelling]
    weights = tensors()
    directory = write(tmp_path / "head", rename(weights), **settings)
    assert check_directory(directory, "speculator") == directory
    spec = spec_of(directory, target)
    assert spec.taps == ((1, 3, 6) if spelling == "nested" else (2, 3, 3))
    engine, plane = made_ready(NativeEngine(lane(target))), TensorPlane()
    tap = Tap(spec.taps, {0: 0}, lambda start, rows: plane.pack_rows(start, rows, ""))
    engine.open(0)
    engine.forward([Window(0, 0, TEXT[:-1], 1)], tap)
    (part,) = tap.rows(0, len(TEXT))
    rows = plane.rows(part)
    assert rows.shape == (len(TEXT) - 1, 3 * HIDDEN)
    head = Head(spec, target, torch.device("cpu"), narrow=False)
    assert head.tokens.tolist() == [4 * i + 1 for i in range(DRAFTED)]
    with torch.inference_mode():
        embedded = head._embedding[torch.tensor(TEXT[1:])].float()
        last, logits = reference(weights, rows.float(), embedded, normed_residual=spelling == "nested")
        fused, context = head.fuse(rows), head.context()
        head.absorb([Read(fused[:-1], TEXT[1:-1], 0, context)])
        next_rows, found = head.step([Entry(fused[-1], TEXT[-1], len(TEXT) - 2, context)])
    torch.testing.assert_close(found[0], logits, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(next_rows[0], last, rtol=2e-3, atol=2e-3)


def test_one_with_a_whole_vocabulary_of_its_own(target, tmp_path):
    weights = tensors()
    for name in ("d2t", "t2d"):
        del weights[name]
    weights["lm_head.weight"] = torch.ones(VOCABULARY, HIDDEN)
    weights["embed_tokens.weight"] = torch.full((VOCABULARY, HIDDEN), 0.5)
    head = Head(spec_of(write(tmp_path / "head", weights), target), target, torch.device("cpu"), narrow=False)
    assert head.tokens.tolist() == list(range(VOCABULARY))
    assert float(head._embedding[7, 7]) == 0.5


def test_it_is_a_speculator_by_its_directory(target, tmp_path):
    directory = write(tmp_path / "head", tensors())
    config = Config(target=str(target), speculator=str(directory), threads=1)
    found = speculator_spec(config, lane(target), lambda line: None)
    assert (found.engine, found.head.file) == ("cascade", str(directory / eagle3.FILE))
    with pytest.raises(InvalidConfig, match="reads hidden rows of the target, but engine hf shows none"):
        speculator_spec(
            replace(config, engine="hf"),
            LaneSpec("target", "hf", str(target), "fp32", "cpu", 1, 4, 64),
            print,
        )


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"vocab_size": 100}, "is a head for 100 tokens, but target .* has 211"),
        ({"fc_norm": True}, "has fc_norm True, of which only False is known"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "has use_aux_hidden_state False"),
        ({"num_hidden_layers": 2}, "has num_hidden_layers 2, of which only 1 is known"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 9, 3]}, r"after layers \[1, 9, 3\], but the target has 6"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3]}, "reads rows of 288, but 2 layers .* make 192"),
    ],
)
def test_what_its_config_cannot_be(target, tmp_path, settings, says):
    with pytest.raises(InvalidConfig, match=says) as refusal:
        spec_of(write(tmp_path / "head", tensors(), **settings), target)
    assert refusal.value.field == "speculator"
    assert "try " in str(refusal.value)


def test_what_its_files_cannot_be(target, tmp_path):
    directory = write(tmp_path / "head", {"x": torch.zeros(1)})
    with pytest.raises(InvalidConfig, match=r"has no fc\.weight, so it is no head"):
        spec_of(directory, target)
    (directory / eagle3.FILE).unlink()
    with pytest.raises(InvalidConfig, match="heads are read from one file of safetensors only"):
        spec_of(directory, target)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(
        InvalidConfig, match=r"only pytorch_model.bin\); weights are read from safetensors only"
    ):
        check_directory(directory, "speculator")
    write(directory, tensors())
    with pytest.raises(InvalidConfig, match="is a drafting head and no model"):
        prepare(Config(target=str(directory), threads=1), lambda line: None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"midlayer.self_attn.q_proj.bias": torch.zeros(128)}, "has a tensor midlayer.self_attn.q_proj.bias"),
        ({"d2t": torch.full((DRAFTED,), 500)}, "maps 50 of its 50 tokens to 211 of the target's"),
        ({"midlayer.mlp.up_proj.weight": None}, "it has no gate_proj and up_proj"),
        ({"norm.weight": None}, "it has no tensor 'norm_out.weight'"),
        ({"embed_tokens.weight": torch.zeros(VOCABULARY, 32)}, "is a head for rows of 96"),
    ],
)
def test_what_its_tensors_cannot_be(target, tmp_path, changes, says):
    weights = {name: tensor for name, tensor in (tensors() | changes).items() if tensor is not None}
    spec = spec_of(write(tmp_path / "head", weights), target)
    with pytest.raises(ValueError, match=says):
        Head(spec, target, torch.device("cpu"), narrow=False)
