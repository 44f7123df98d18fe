"""The native engine against transformers: logits of every family, and greedy text of a real model."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from msgspec.structs import replace
from small_models import FAMILIES, lane, save

from ipc.messages import LaneSpec
from workers import linear
from workers.attention import ROW_BY_ROW
from workers.blocks import BLOCK
from workers.engines.engine import Window
from workers.engines.native import NativeEngine, loading
from workers.lifecycle import made_ready
from workers.linear import ONE_BY_ONE, has_bfloat16, plain

needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="a CPU without bfloat16 arithmetic")


@pytest.fixture(autouse=True)
def one_thread():
    """Small products gain nothing from threads, and lose much where other work shares the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def token_ids(length, size=211):
    return torch.randint(0, size, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def logits(engine, *windows):
    """Rows of all tokens of windows (start, tokens) of one sequence, one window a pass."""
    engine.open(0)
    rows = [engine.forward([Window(0, start, tokens, len(tokens))]) for start, tokens in windows]
    engine.close(0)
    return torch.cat(rows)


def reference(directory, ids, dtype=torch.float32):
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model.float().eval()(torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_every_family_equal_transformers(family, tmp_path):
    ids = token_ids(150)
    engine = made_ready(NativeEngine(lane(save(tmp_path, family))))
    rows = logits(engine, (0, ids[:100]), (100, ids[100:117]), *((at, [ids[at]]) for at in range(117, 150)))
    assert rows.dtype == torch.float32
    assert (rows - reference(tmp_path, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(("dtype", "stored"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_16_bit_lanes_are_float32_on_rounded_weights(dtype, stored, tmp_path, monkeypatch):
    """On CPUs without arithmetic in that type."""
    monkeypatch.setattr(linear, "has_bfloat16", lambda: False)
    ids = token_ids(40)
    rows = logits(made_ready(NativeEngine(lane(save(tmp_path, "qwen2"), dtype=dtype))), (0, ids))
    assert (rows - reference(tmp_path, ids, stored)).abs().max() < 1e-4


@needs_bfloat16
@pytest.mark.parametrize("kernel", ["fused", "blocked"])
@pytest.mark.parametrize("family", ["llama, biases", "mistral, sliding window", "qwen3"])
def test_bfloat16_arithmetic_is_as_good_as_that_of_transformers(kernel, family, tmp_path, monkeypatch):
    """Against float32 on the same weights; here the rows that layers add to stay in float32."""
    if kernel == "blocked":  # what is left where the library's own kernel fails the proof
        monkeypatch.setattr(loading, "fused", lambda *parts: parts[6].normal_())
    ids = token_ids(150)
    engine = made_ready(NativeEngine(lane(save(tmp_path, family), dtype="bf16")))
    rows = logits(engine, (0, ids[:100]), (100, ids[100:117]), *((at, [ids[at]]) for at in range(117, 150)))
    exact = reference(tmp_path, ids, torch.bfloat16)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([ids]), use_cache=False).logits[0].float()
    assert not any("computed in float32" in note for note in engine.notes)
    assert 0 < (rows - exact).square().mean() <= (theirs - exact).square().mean()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_16_bit_checkpoint_runs_in_16_bit_storage_with_the_same_logits(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "has_bfloat16", lambda: False)
    ids = token_ids(40)
    engine = made_ready(
        NativeEngine(lane(save(tmp_path, "llama, biases", dtype=torch.bfloat16), dtype=dtype))
    )
    assert (logits(engine, (0, ids)) - reference(tmp_path, ids)).abs().max() < 1e-4


def test_a_sharded_checkpoint_is_read_whole(tmp_path):
    ids = token_ids(20)
    save(tmp_path / "whole", "llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    model.save_pretrained(tmp_path / "shards", max_shard_size="200KB")
    assert not (tmp_path / "shards" / "model.safetensors").exists()
    engines = [made_ready(NativeEngine(lane(tmp_path / name))) for name in ("whole", "shards")]
    one, many = (logits(engine, (0, ids)) for engine in engines)
    assert torch.equal(one, many)


def test_old_field_names_of_the_rotary_embedding_are_read(tmp_path):
    ids = token_ids(60)
    new = logits(made_ready(NativeEngine(lane(save(tmp_path, "llama 3")))), (0, ids))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    path.write_text(json.dumps({**config, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}))
    assert torch.equal(logits(made_ready(NativeEngine(lane(tmp_path))), (0, ids)), new)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architectures is .'GPT2LMHeadModel'.*LlamaForCausalLM"),
        ({"architectures": None}, "architectures is .*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; the native engine supports 'silu'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'.*default, linear"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0.*above 0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5.*1 only"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*None only"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*one kind of attention"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4.*divisors of num_attention_heads, 6"),
        ({"head_dim": 15}, "head_dim is 15.*even"),
        ({"hidden_size": -1}, "hidden_size is -1.*above 0"),
        ({"num_hidden_layers": 3}, "has no tensor model.layers.2.self_attn.q_proj.weight"),
        ({"num_hidden_layers": 1}, "tensors are not of this architecture, such as model.layers.1"),
        ({"intermediate_size": 16}, r"gate_proj.weight has shape \[112, 96\], expected \[16, 96\]"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(change, message, tmp_path):
    path = save(tmp_path, "llama") / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        made_ready(NativeEngine(lane(tmp_path)))


def test_files_that_are_missing_or_broken_are_named(tmp_path):
    save(tmp_path, "llama")
    weights, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    weights.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a safetensors file"):
        made_ready(NativeEngine(lane(tmp_path)))
    weights.unlink()
    with pytest.raises(FileNotFoundError):
        made_ready(NativeEngine(lane(tmp_path)))
    index.write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(ValueError, match="not a file beside it"):
        made_ready(NativeEngine(lane(tmp_path)))
    index.write_text("[]")
    with pytest.raises(ValueError, match="not an index"):
        made_ready(NativeEngine(lane(tmp_path)))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return made_ready(NativeEngine(lane(save(tmp_path_factory.mktemp("small"), "llama"), slots=2)))


def test_it_says_how_long_its_steps_took(small, tmp_path):
    """Plain ones and the widest, of as many sequences as there is room for, and of one."""

    def steps(engine):
        assert all(0 < step.seconds < 10 for step in engine.step_times)
        return [(step.sequences, step.rows) for step in engine.step_times]

    spec = replace(lane(save(tmp_path, "llama"), slots=2), num_speculative_tokens=3)
    assert steps(made_ready(NativeEngine(spec))) == [(2, 2), (1, 1), (2, 8), (1, 4)]
    assert steps(small) == [(2, 2), (1, 1)]  # nobody drafts
    assert steps(made_ready(NativeEngine(spec), kv_tokens=BLOCK)) == [(1, 1), (1, 1), (1, 4), (1, 4)]


def test_a_cpu_on_which_nothing_agrees_runs_row_by_row_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "choose", lambda samples, candidates, ways: (plain, ONE_BY_ONE))
    monkeypatch.setattr(loading, "prove_tiling", lambda *shape: ROW_BY_ROW)
    engine, ids = made_ready(NativeEngine(lane(save(tmp_path, "qwen3")))), token_ids(80)
    rows = logits(engine, (0, ids))
    assert (rows - reference(tmp_path, ids)).abs().max() < 1e-4
    assert torch.equal(logits(engine, (0, ids[:70]), (70, ids[70:77]), (77, ids[77:])), rows)
    assert any("layers and output and attention had to be run row by row" in note for note in engine.notes)


def test_an_impossible_length_is_refused(tmp_path):
    spec = LaneSpec("target", "native", str(save(tmp_path, "llama")), "fp32", "cpu", 1, 1, 257)
    with pytest.raises(ValueError, match="max_model_len is 257, but the model's context is 256"):
        made_ready(NativeEngine(spec))


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ([Window(0, 4, [1], 1)], "holds 3 of at most 256 tokens; 1 rows of 1 tokens at 4"),
        ([Window(0, 3, [1], 2)], "2 rows of 1 tokens at 3"),
        ([Window(0, 0, [1] * 257, 0)], "0 rows of 257 tokens at 0"),
        ([Window(0, 0, [211], 1)], "is not in 0 … 210"),
        ([Window(0, 0, [-1], 1)], "is not in 0 … 210"),
        ([Window(0, 3, [1], 1), Window(0, 4, [1], 1)], "more than one window"),
    ],
)
def test_a_window_that_cannot_be_run_changes_nothing(small, windows, message):
    small.open(0)
    before = small.forward([Window(0, 0, [5, 6, 7], 3)])
    with pytest.raises(ValueError, match=message):
        small.forward(windows)
    assert torch.equal(small.forward([Window(0, 2, [7], 1)]), before[2:])
    small.close(0)


def test_sequences_beyond_the_limit_are_refused_and_room_is_reused(small):
    small.open(0)
    small.open(1)
    with pytest.raises(MemoryError, match="max_sequences"):
        small.open(2)
    small.close(0)
    small.open(2)
    small.close(1)
    small.close(2)


def test_windows_may_want_no_rows_or_have_no_tokens(small):
    small.open(0)
    assert small.forward([]).shape == (0, 211)
    assert small.forward([Window(0, 0, [], 0)]).shape == (0, 211)
    assert small.forward([Window(0, 0, token_ids(100), 0)]).shape == (0, 211)
    assert small.forward([Window(0, 100, [1, 2], 1)]).shape == (1, 211)
    small.close(0)


def test_warm_up_leaves_all_slots_free(small):
    small.warm_up()
    small.open(0)
    small.open(1)
    small.close(0)
    small.close(1)
    assert (small.vocabulary.size, small.max_model_len) == (211, 256)
    assert any("batch-invariant" in note for note in small.notes)


@pytest.mark.model
@pytest.mark.timeout(600)
def test_greedy_text_equals_transformers_generate(smollm2, greedy):
    prompts, expected = greedy
    count = len(prompts)
    engine = made_ready(
        NativeEngine(LaneSpec("target", "native", str(smollm2), "fp32", "cpu", 1, count, 512))
    )
    for seq in range(count):
        engine.open(seq)
    texts = [list(prompt) for prompt in prompts]
    rows = engine.forward([Window(seq, 0, text, 1) for seq, text in enumerate(texts)])
    for _ in expected[0]:
        for text, token in zip(texts, rows.argmax(1).tolist(), strict=True):
            text.append(token)
        rows = engine.forward([Window(seq, len(text) - 1, text[-1:], 1) for seq, text in enumerate(texts)])
    assert texts == [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
