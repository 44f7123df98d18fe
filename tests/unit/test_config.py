"""The executor's options and what is refused before any worker starts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from executor.checkpoint import NATIVE_ARCHITECTURES
from executor.config import Config, Recovery, Timeouts, available_cores
from executor.errors import InvalidConfig, InvalidRequest
from executor.model import check_length, check_prompt, prepare
from executor.restart import RestartPolicy
from workers.engines.native.config import ARCHITECTURES

REFUSED = [
    ("engine", "jet", "native"),
    ("dtype", "int3", "fp32"),
    ("device", "tpu", "auto"),
    ("device", "cuda:x", "auto"),
    ("device", "cpu:0", "auto"),
    ("device", "cuda:", "auto"),
    ("device", "cuda:²", "auto"),
    ("device", "", "auto"),
    ("device", None, "auto"),
    ("target", 5, "smollm2-135m"),
    ("speculator", "", "ngram"),
    ("speculator", None, "ngram"),
    ("cache_dir", "", "./models"),
    ("cache_dir", 5, "./models"),
    ("cache_dir", "~nosuchuser/x", "./models"),
    ("engine", None, "native"),
    ("timeouts", {"load": 3}, "timeouts=Timeouts(load=600.0)"),
    ("recovery", None, "recovery=Recovery(strikes=3)"),
    ("num_speculative_tokens", 0, "5"),
    ("num_speculative_tokens", 33, "5"),
    ("num_speculative_tokens", 2.5, "5"),
    ("num_speculative_tokens", True, "5"),
    ("max_sequences", 0, "8"),
    ("max_sequences", 1025, "8"),
    ("max_model_len", 1, "2048"),
    ("max_model_len", "long", "2048"),
    ("threads", 0, str(available_cores())),
    ("transport", "pigeon", "auto"),
    ("require_cuda_ipc", "yes", "require_cuda_ipc=True"),
]


@pytest.mark.parametrize(("field", "value", "works"), REFUSED)
def test_a_refusal_names_the_option_the_value_and_one_that_works(field, value, works):
    with pytest.raises(InvalidConfig) as refusal:
        Config(**{field: value})
    assert refusal.value.field == field
    message = str(refusal.value)
    assert "\n" not in message
    assert field in message.replace("-", "_")
    assert repr(value) in message
    assert works in message.rpartition("try ")[2]


@pytest.mark.parametrize(
    ("field", "value", "works"),
    [("transport", "memfd", "auto"), ("device", "cpu", "device cuda"), ("lanes", "inline", "lanes process")],
)
def test_cuda_ipc_cannot_be_required_where_it_cannot_be(field, value, works):
    with pytest.raises(InvalidConfig, match=f"require-cuda-ipc contradicts {field} {value}") as refusal:
        Config(**{field: value}, require_cuda_ipc=True)
    assert str(refusal.value).endswith(f"try {works}")


@pytest.mark.parametrize("name", ["load", "draft", "verify", "hang", "stop"])
@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "soon", None, True])
def test_a_timeout_is_a_positive_number_of_seconds(name, seconds):
    with pytest.raises(
        InvalidConfig, match=f"{name}-timeout must be a positive number.*try [0-9]"
    ) as refusal:
        Timeouts(**{name: seconds})
    assert refusal.value.field == f"{name}_timeout"


def test_a_lane_must_not_hang_before_its_draft_is_late():
    with pytest.raises(
        InvalidConfig, match=r"^hang-timeout 2 must not be below draft_timeout 10; try 10$"
    ) as refusal:
        Timeouts(hang=2.0)
    assert refusal.value.field == "hang_timeout"
    assert Timeouts(hang=10.0)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("group", {"group": "all"}),
        ("standby", {"standby": "target"}),
        ("standby", {"standby": ("draft",)}),
        ("strikes", {"strikes": 0}),
        ("collapse_share", {"collapse_share": "1"}),
        ("collapse_share", {"collapse_share": 1.5}),
        ("policy", {"policy": None}),
        ("intensity", {"policy": RestartPolicy(intensity=-1)}),
        ("period", {"policy": RestartPolicy(period=0)}),
        ("backoff", {"policy": RestartPolicy(backoff="soon")}),
        ("backoff_max", {"policy": RestartPolicy(backoff_max=math.inf)}),
    ],
)
def test_recovery_that_cannot_be_is_refused(field, options):
    with pytest.raises(InvalidConfig, match=r"; try ") as refusal:
        Recovery(**options)
    assert refusal.value.field == field


def test_paths_may_be_text(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config(cache_dir="/models").cache_dir == Path("/models")
    assert Config(cache_dir="~/models").cache_dir == tmp_path / "models"
    assert Config(target=tmp_path).target == str(tmp_path)
    assert Config(target=None).target == "smollm2-135m"


def test_the_default_target_hangs_on_the_engine():
    assert Config().target == "smollm2-135m"
    assert Config(engine="toy").target == "vocabulary=256"


def test_devices():
    assert [Config(device=device).device for device in ("auto", "cpu", "cuda", "cuda:1")]


def test_specs_of_toys():
    config = Config(
        engine="toy", target="vocabulary=32, context=100", speculator="vocabulary=32,agree=0.5", threads=2
    )
    prepared = prepare(config, print)
    assert prepared.max_model_len == 100
    target, speculator = prepared.specs
    assert (target.lane, target.engine, target.model) == ("target", "toy", "vocabulary=32, context=100")
    assert (speculator.lane, speculator.engine, speculator.model) == (
        "speculator",
        "toy",
        "vocabulary=32,agree=0.5",
    )
    assert (target.threads, target.max_sequences, target.max_model_len) == (2, 8, 100)


def test_ngram_and_off():
    assert [s.engine for s in prepare(Config(engine="toy", speculator="ngram"), print).specs] == [
        "toy",
        "ngram",
    ]
    assert [s.engine for s in prepare(Config(engine="toy", speculator="off"), print).specs] == ["toy"]


def test_toys_of_different_vocabularies_are_refused_before_anything_starts():
    with pytest.raises(
        InvalidConfig,
        match=r"vocabularies differ: target 32 tokens, speculator 256; try vocabulary=32,agree=0.5$",
    ):
        prepare(Config(engine="toy", target="vocabulary=32", speculator="agree=0.5"), print)


@pytest.mark.parametrize(
    ("field", "toy", "says"),
    [
        ("target", "vocabulary=0", "vocabulary must be a whole number from 2 to 2147483648, got '0'"),
        ("target", "vocabulary=²", "vocabulary must be a whole number"),
        ("target", "vocabulary=", "vocabulary must be a whole number"),
        ("target", "context=1", "context must be a whole number of at least 2, got '1'"),
        ("target", "step_ms=soon", "step_ms must be a number of at least 0, got 'soon'"),
        ("target", "/nonexistent", "a toy has no parameter '/nonexistent', only vocabulary, "),
        ("speculator", "vocabulary=256,agree=2", "agree must be a number from 0 to 1, got '2'"),
        ("speculator", "foo", "a toy has no parameter 'foo'"),
        ("speculator", "NGRAM", "a toy has no parameter 'NGRAM'"),
        ("speculator", "vocabulary=9", "vocabularies differ: target 256 tokens, speculator 9"),
        ("speculator", "context=50,vocabulary=64", "vocabularies differ"),
    ],
)
def test_toys_are_checked_before_anything_starts_and_the_values_offered_work(field, toy, says):
    with pytest.raises(InvalidConfig) as refusal:
        prepare(Config(**{"engine": "toy", field: toy}), print)
    assert refusal.value.field == field
    assert says in str(refusal.value)
    for works in str(refusal.value).rpartition("; try ")[2].split(", or "):
        assert prepare(Config(**{"engine": "toy", field: works}), print).specs


def test_a_toy_has_a_context_too():
    with pytest.raises(InvalidConfig, match="max-model-len 101 is beyond the target's context; try 100"):
        prepare(Config(engine="toy", target="context=100", max_model_len=101), print)
    specs = prepare(Config(engine="toy", target="context=100", speculator="context=50"), print).specs
    assert [spec.max_model_len for spec in specs] == [100, 50]


def test_the_native_engine_refuses_what_it_has_no_code_for_before_anything_is_loaded(tmp_path):
    model = checkpoint(tmp_path, architectures=["GPT2LMHeadModel"])
    with pytest.raises(InvalidConfig, match=r"is a GPT2LMHeadModel.*LlamaForCausalLM.*try --engine hf$"):
        prepare(Config(target=str(model)), print)
    assert NATIVE_ARCHITECTURES == ARCHITECTURES


@pytest.mark.parametrize("context", [True, None, 1, 2.5, "2048"])
def test_a_checkpoint_must_tell_its_context(tmp_path, context):
    model = checkpoint(tmp_path, max_position_embeddings=context)
    with pytest.raises(InvalidConfig) as refusal:
        prepare(Config(target=str(model)), print)
    message = f"config.json has max_position_embeddings {context!r}; it must be above 1, like 2048"
    assert str(refusal.value).endswith(message)


def checkpoint(directory, **settings):
    """A directory that is one, as far as the executor looks before it reads the tokenizer."""
    fields = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "max_position_embeddings": 64}
    (directory / "config.json").write_text(json.dumps(fields | settings))
    (directory / "model.safetensors").write_bytes(b"")
    return directory


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([], "empty"),
        ([1] * 8, "8 tokens, the context 8; shorten it to 7 tokens or less"),
        ([1, 10], "token 10 is not in the vocabulary, 0 to 9"),
        ([-1], "token -1 is not"),
        ([1.0], "token 1.0 is not"),
        ([True], "token True is not"),
        (["a"], "token 'a' is not"),
    ],
)
def test_prompts_that_cannot_be_run(tokens, says):
    with pytest.raises(InvalidRequest, match=says) as refusal:
        check_prompt(tokens, 10, 8)
    assert refusal.value.field == "prompt"


def test_prompts_that_can():
    check_prompt([0, 9], 10, 8)
    check_length(7, 8)


@pytest.mark.parametrize("speculator", ["eagle", "cascade", "head.safetensors"])
def test_heads_need_an_engine_that_shows_hidden_rows(speculator):
    with pytest.raises(InvalidConfig, match="toy shows none; use --engine native, or try suffix") as refusal:
        prepare(Config(engine="toy", speculator=speculator), print)
    assert refusal.value.field == "speculator"


def test_the_speculator_that_suits_the_target_is_taken_if_none_is_named():
    assert Config().speculator == "cascade"
    assert Config(target="smollm2-135m", speculator="auto").speculator == "cascade"
    assert Config(engine="hf").speculator == "ngram"
    assert Config(target="./other").speculator == "ngram"
    assert Config(engine="toy").speculator == "ngram"
