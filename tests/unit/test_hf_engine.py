"""The hf engine on small random models: transformers' own logits and tokens in any windows; refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from ipc.messages import LaneSpec
from workers.engines import hf, hf_attention, hf_model
from workers.engines.engine import Window
from workers.engines.hf import HfEngine

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

CONTEXT = 96
SLOTS = 4
NEW_TOKENS = 12

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


class Pair:
    """An engine and the plain model of the same checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.engine = HfEngine(spec(directory))
        self.plain = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def expected(self, ids: list[int]) -> Tensor:
        return self.plain(torch.tensor([ids]), use_cache=False).logits[0]

    def run(self, *windows: tuple[int, int, list[int]]) -> list[Tensor]:
        """All rows of each window (sequence, start, tokens)."""
        rows = self.engine.forward([Window(seq, start, ids, len(ids)) for seq, start, ids in windows])
        return list(torch.split(rows, [len(ids) for _, _, ids in windows]))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(save(FAMILIES[request.param](), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Pair(save(FAMILIES["llama"](), tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True)
def closed(request):
    """Every test leaves its engine empty."""
    yield
    for name in {"pair", "llama"} & set(request.fixturenames):
        engine = request.getfixturevalue(name).engine
        for seq in range(SLOTS):
            try:
                engine.close(seq)
            except KeyError:
                continue


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max().clamp_min(1)))


def test_greedy_tokens_of_a_mixed_batch_equal_generate(pair: Pair) -> None:
    prompts = [tokens(length, seed=length) for length in (1, 5, 11, 30)]
    texts = [list(prompt) for prompt in prompts]
    for seq in range(SLOTS):
        pair.engine.open(seq)
    rows = pair.engine.forward([Window(seq, 0, text, 1) for seq, text in enumerate(texts)])
    for _ in range(NEW_TOKENS):
        for text, row in zip(texts, rows, strict=True):
            text.append(int(row.argmax()))
        rows = pair.engine.forward([Window(seq, len(t) - 1, t[-1:], 1) for seq, t in enumerate(texts)])
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        expected = pair.plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        assert text == expected[0].tolist()


def test_windows_of_any_width_give_the_logits_of_the_whole(pair: Pair) -> None:
    ids = tokens(27)
    expected = pair.expected(ids)
    for width in range(1, 9):
        pair.engine.open(0)
        rows = [pair.run((0, start, ids[start : start + width]))[0] for start in range(0, len(ids), width)]
        close(torch.cat(rows), expected)
        pair.engine.close(0)


def test_packed_sequences_do_not_see_each_other(pair: Pair) -> None:
    ids = [tokens(length, seed=length) for length in (20, 3, 14, 9)]
    for seq in range(SLOTS):
        pair.engine.open(seq)
    first = pair.run(*((seq, 0, text[: seq + 2]) for seq, text in enumerate(ids)))
    second = pair.run(*((seq, seq + 2, text[seq + 2 :]) for seq, text in reversed(list(enumerate(ids)))))
    for seq, text in enumerate(ids):
        close(torch.cat([first[seq], second[SLOTS - 1 - seq]]), pair.expected(text))


def test_what_lies_beyond_the_start_is_dropped(pair: Pair) -> None:
    ids, wrong = tokens(16), tokens(16, seed=9)
    pair.engine.open(0)
    pair.run((0, 0, ids[:10] + wrong[10:]))
    rows = pair.run((0, 10, ids[10:13]))[0]
    close(rows, pair.expected(ids)[10:13])
    with pytest.raises(ValueError, match="holds 13"):
        pair.run((0, 14, ids[14:]))


def test_a_prefill_in_several_passes_changes_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "PASS_TOKENS", 7)
    long, short = tokens(40), tokens(5, seed=2)
    pair.engine.open(0)
    pair.engine.open(1)
    windows = [Window(0, 0, long, 17), Window(1, 0, short, 2)]
    rows = pair.engine.forward(windows)
    close(rows, torch.cat([pair.expected(long)[-17:], pair.expected(short)[-2:]]))


def test_many_rows_in_one_piece(llama: Pair) -> None:
    ids = tokens(CONTEXT)
    llama.engine.open(0)
    close(llama.run((0, 0, ids))[0], llama.expected(ids))


def test_only_the_rows_asked_for_are_returned(llama: Pair) -> None:
    ids = tokens(12)
    for seq in (0, 1, 2):
        llama.engine.open(seq)
    rows = llama.engine.forward([Window(0, 0, ids, 0), Window(1, 0, ids, 3), Window(2, 0, [], 0)])
    assert rows.dtype == torch.float32
    close(rows, llama.expected(ids)[-3:])
    assert llama.engine.forward([]).shape == (0, COMMON["vocab_size"])
    assert llama.engine.forward([Window(1, 5, [], 0)]).shape == (0, COMMON["vocab_size"])
    close(llama.run((1, 5, ids[5:]))[0], llama.expected(ids)[5:])


def test_a_slot_is_reused_without_a_trace(llama: Pair) -> None:
    ids = tokens(8)
    llama.engine.open(0)
    llama.run((0, 0, tokens(50, seed=4)))
    llama.engine.close(0)
    llama.engine.open(1)
    close(llama.run((1, 0, ids))[0], llama.expected(ids))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Window(1, 3, [5], 1), "holds 2 of at most 96"),
        (Window(1, -1, [5], 1), "holds 2"),
        (Window(1, 2, [5], 2), "2 rows of 1 tokens"),
        (Window(1, 2, [5], -1), "-1 rows"),
        (Window(1, 2, [5] * CONTEXT, 1), "96 tokens at 2"),
        (Window(1, 2, [5, 101], 1), r"token 101 is not in 0 … 100"),
        (Window(1, 2, [-1], 1), "token -1"),
        (Window(0, 0, [5], 1), "more than one window"),
    ],
)
def test_a_window_that_cannot_be_run_changes_nothing(llama: Pair, bad: Window, message: str) -> None:
    ids = tokens(6)
    llama.engine.open(0)
    llama.engine.open(1)
    llama.run((0, 0, ids[:4]), (1, 0, ids[:2]))
    with pytest.raises(ValueError, match=message):
        llama.engine.forward([Window(0, 1, [7], 1), bad])
    close(llama.run((0, 4, ids[4:]))[0], llama.expected(ids)[4:])


def test_sequences_beyond_the_slots_are_refused(llama: Pair) -> None:
    for seq in range(SLOTS):
        llama.engine.open(seq)
    with pytest.raises(MemoryError):
        llama.engine.open(SLOTS)


def test_it_says_what_it_is_and_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(FAMILIES["llama"](), tmp_path)
    capfd.readouterr()
    engine = HfEngine(spec(tmp_path, max_sequences=2, max_model_len=40))
    engine.warm_up()
    assert capfd.readouterr() == ("", "")
    assert engine.vocabulary.size == COMMON["vocab_size"]
    assert engine.max_model_len == 40
    assert any("last bits" in note for note in engine.notes)
    engine.open(0)
    engine.open(1)


def test_one_sequence_of_one_token_can_be_proved(tmp_path: Path) -> None:
    engine = HfEngine(spec(save(FAMILIES["llama"](), tmp_path), max_sequences=1, max_model_len=1))
    engine.warm_up()
    assert engine.max_model_len == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits(tmp_path: Path, dtype: str) -> None:
    engine = HfEngine(spec(save(FAMILIES["llama"](), tmp_path), dtype))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=hf_model.DTYPES[dtype]).float()
    ids = tokens(20)
    engine.open(0)
    rows = engine.forward([Window(0, 0, ids, len(ids))])
    with torch.inference_mode():
        expected = plain(torch.tensor([ids])).logits[0]
    assert rows.dtype == torch.float32
    if any("computed in fp32" in note for note in engine.notes):
        close(rows, expected)
    else:
        assert float((rows - expected).norm() / expected.norm()) < 0.05


# ---------------------------------------------------------------- refusals

REFUSED: dict[str, tuple[Callable[[], transformers.PreTrainedConfig], str]] = {
    "own attention with ALiBi": (
        lambda: transformers.BloomConfig(vocab_size=101, hidden_size=32, n_layer=3, n_head=4),
        "BloomForCausalLM: 0 of its 3 layers attend",
    ),
    "state space": (
        lambda: transformers.MambaConfig(vocab_size=101, hidden_size=32, num_hidden_layers=3),
        "MambaForCausalLM: 0 of its 3 layers attend",
    ),
    "attention sinks": (
        lambda: transformers.GptOssConfig(**SLIDING, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "GptOssForCausalLM: .* asks for s_aux",
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
        HfEngine(spec(save(config(), tmp_path)))
    assert "\n" not in str(refused.value)
    assert "choose a decoder-only model" in str(refused.value)


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(vocab_size=101, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"cannot load .*T5Config") as refused:
        HfEngine(spec(tmp_path))
    assert "\n" not in str(refused.value)


def test_the_proof_finds_a_wrong_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(FAMILIES["llama"](), tmp_path)
    monkeypatch.setattr(hf_attention.PackedWindows, "_mask", lambda *_: None)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM: .* off transformers' own"):
        HfEngine(spec(tmp_path))


def test_the_proof_finds_positions_that_the_model_ignores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(FAMILIES["llama"](), tmp_path)
    rotate = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding.forward

    def by_place(self, x, position_ids):
        return rotate(self, x, torch.arange(x.shape[1])[None])

    monkeypatch.setattr(transformers.models.llama.modeling_llama.LlamaRotaryEmbedding, "forward", by_place)
    with pytest.raises(ValueError, match="off transformers' own"):
        HfEngine(spec(tmp_path))


def test_a_context_that_cannot_be_served_names_one_that_can(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    with pytest.raises(ValueError, match=r"max_model_len 97 .* use at most 96"):
        HfEngine(spec(tmp_path, max_model_len=CONTEXT + 1))


def test_longrope_ends_where_it_would_depend_on_the_batch(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    config = transformers.Phi3Config(**GROUPED, original_max_position_embeddings=32, rope_parameters=rope)
    save(config, tmp_path)
    engine = HfEngine(spec(tmp_path))
    assert engine.max_model_len == 32
    assert any("limited to 32 tokens" in note for note in engine.notes)
    with pytest.raises(ValueError, match=r"longrope .* use at most 32"):
        HfEngine(spec(tmp_path, max_model_len=33))


def test_a_sliding_window_that_is_not_passed_bounds_the_context(tmp_path: Path) -> None:
    config = transformers.PhimoeConfig(**SLIDING, num_local_experts=2, num_experts_per_tok=1)
    save(config, tmp_path)
    engine = HfEngine(spec(tmp_path))
    assert engine.max_model_len == 6
    with pytest.raises(ValueError, match=r"sliding window .* use at most 6"):
        HfEngine(spec(tmp_path, max_model_len=7))


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(ValueError, match=r"has 9 missing weights, as model\.layers\.3\."):
        HfEngine(spec(tmp_path))


def test_weights_that_are_not_used_are_noted(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    notes = HfEngine(spec(tmp_path)).notes
    assert any(
        note.startswith("9 weights of the checkpoint are not used, as model.layers.2.") for note in notes
    )


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    save(FAMILIES["llama"](), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        HfEngine(spec(tmp_path))


@pytest.mark.parametrize("version", ["5.25.0", "5.2.4", "4.57.1", "6.24.0"])
def test_another_transformers_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=rf"transformers>=5\.24,<5\.25, found {version}"):
        hf_model.check_version(version)
