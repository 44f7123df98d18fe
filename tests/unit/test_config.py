"""The executor's options and what is refused before any worker starts."""

from __future__ import annotations

import math

import pytest

from executor.config import Config, Timeouts, available_cores
from executor.errors import InvalidConfig, InvalidRequest
from executor.model import check_length, check_prompt, prepare

REFUSED = [
    ("engine", "jet", "native"),
    ("dtype", "int3", "fp32"),
    ("device", "tpu", "auto"),
    ("device", "cuda:x", "auto"),
    ("device", "cpu:0", "auto"),
    ("speculator", "", "ngram"),
    ("num_speculative_tokens", 0, "5"),
    ("num_speculative_tokens", 33, "5"),
    ("num_speculative_tokens", 2.5, "5"),
    ("num_speculative_tokens", True, "5"),
    ("max_sequences", 0, "8"),
    ("max_sequences", 1025, "8"),
    ("max_model_len", 1, "2048"),
    ("max_model_len", "long", "2048"),
    ("threads", 0, str(available_cores())),
]


@pytest.mark.parametrize(("field", "value", "works"), REFUSED)
def test_a_refusal_names_the_option_the_value_and_one_that_works(field, value, works):
    with pytest.raises(InvalidConfig) as refusal:
        Config(**{field: value})
    assert refusal.value.field == field
    message = str(refusal.value)
    assert "\n" not in message
    assert field.replace("_", "-") in message
    assert works in message.rpartition("try ")[2]


@pytest.mark.parametrize("name", ["load", "draft", "verify", "hang", "stop"])
@pytest.mark.parametrize("seconds", [0, -1, math.nan, math.inf, "soon", None, True])
def test_a_timeout_is_a_positive_number_of_seconds(name, seconds):
    with pytest.raises(
        InvalidConfig, match=f"{name}-timeout must be a positive number.*try [0-9]"
    ) as refusal:
        Timeouts(**{name: seconds})
    assert refusal.value.field == f"{name}_timeout"


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
        InvalidConfig, match=r"vocabularies differ: target 32 tokens, speculator 64; try .*=32"
    ):
        prepare(Config(engine="toy", target="vocabulary=32", speculator="agree=1"), print)


@pytest.mark.parametrize("parameter", ["vocabulary=many", "context=-1", "vocabulary=", "context=1.5"])
def test_toy_parameters_that_the_executor_needs_are_checked(parameter):
    with pytest.raises(InvalidConfig, match=r"toy parameter .* must be a whole number.*try") as refusal:
        prepare(Config(engine="toy", target=parameter), print)
    assert refusal.value.field == "target"


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
