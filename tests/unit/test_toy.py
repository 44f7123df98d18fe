"""The toy: a model by hash that keeps books like a real engine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from draws import draw, toy_lane
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.toy import ToyParameters
from workers.engines import toy
from workers.engines.engine import Window
from workers.engines.toy import FAVOURITE_LOGIT, ToyEngine, ToyModel

GREEDY = draw(temperature=0.0)


def engine(parameters="", **limits):
    return ToyEngine(toy_lane(parameters, **limits))


def greedy(toy_engine, seq, start, tokens, rows):
    states = toy_engine.forward([Window(seq, start, tokens, rows)])
    return [sample.token for sample in toy_engine.sample(states, [GREEDY] * rows)]


def test_parameters_are_read_with_their_defaults():
    assert ToyParameters.parse("") == ToyParameters()
    assert ToyParameters.parse("vocabulary=100, agree=0.8,seed=5,step_ms=2.5") == ToyParameters(
        vocabulary=100, agree=0.8, seed=5, step_ms=2.5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth=3", r"no parameter 'depth', only vocabulary, agree, near, .*$"),
        ("vocabulary", r"vocabulary must be a whole number from 2 to 2147483648, got ''$"),
        ("vocabulary=1", r"vocabulary must be a whole number from 2 to \d+, got '1'$"),
        ("vocabulary=8.5", r"vocabulary must be a whole number .*, got '8.5'$"),
        ("vocabulary=²", r"vocabulary must be a whole number .*, got '²'$"),
        ("agree=1.5", r"agree must be a number from 0 to 1, got '1.5'$"),
        ("agree=nan", r"agree must be a number from 0 to 1, got 'nan'$"),
        ("step_ms=-1", r"step_ms must be a number of at least 0, got '-1'$"),
        ("step_ms=inf", r"step_ms must be a number of at least 0, got 'inf'$"),
        ("order=0", r"order must be a whole number of at least 1, got '0'$"),
        ("context=1", r"context must be a whole number of at least 2, got '1'$"),
        ("seed=1,seed=2", r"seed is given twice$"),
    ],
)
def test_a_wrong_parameter_is_named_with_what_it_may_be(text, message):
    with pytest.raises(ValueError, match=message):
        engine(text)


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (ToyParameters(), "vocabulary=256"),
        (ToyParameters(agree=0.5, seed=3), "vocabulary=256,agree=0.5,seed=3"),
        (ToyParameters(vocabulary=9, step_ms=2.5), "vocabulary=9,step_ms=2.5"),
    ],
)
def test_parameters_as_text(parameters, text):
    assert str(parameters) == text
    assert ToyParameters.parse(text) == parameters


def test_vocabulary_and_context():
    small = engine("vocabulary=10,context=100", max_model_len=30)
    assert (small.vocabulary.size, small.max_model_len) == (10, 30)
    assert engine("context=100").max_model_len == 100
    assert engine("context=100", max_model_len=500).max_model_len == 100
    assert small.vocabulary == engine("vocabulary=10,seed=8").vocabulary
    assert small.vocabulary.fingerprint != engine("vocabulary=11").vocabulary.fingerprint
    assert small.notes == [f"toy model without weights: {small.parameters}"]
    small.warm_up()


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 63), max_size=8))
def test_the_favourite_is_the_one_best_logit_and_all_are_exact_in_float32(context):
    model = ToyModel(ToyParameters(agree=0.5))
    state = model.state(context)
    logits = model.logits(state)
    assert [i for i, logit in enumerate(logits) if logit == FAVOURITE_LOGIT] == [model.favourite(state)]
    assert all(-3.0 <= logit < 3.0 for logit in logits if logit != FAVOURITE_LOGIT)
    assert all((logit * 2**19).is_integer() for logit in logits)


def test_only_the_last_tokens_count():
    model = ToyModel(ToyParameters(order=2))
    assert model.state([9, 8, 1, 2]) == model.state([7, 1, 2]) == model.state([1, 2])
    assert len({model.state(context) for context in ([], [2], [1, 2], [2, 1], [0, 2])}) == 5


@pytest.mark.parametrize("agree", [0.0, 0.3, 0.8, 1.0])
def test_toys_agree_in_the_share_of_contexts_that_was_asked_for(agree):
    target, speculator = ToyModel(ToyParameters()), ToyModel(ToyParameters(agree=agree))
    contexts = [(a, b) for a in range(64) for b in range(64)]
    equal = sum(target.state(context) == speculator.state(context) for context in contexts)
    assert abs(equal / 4096 - agree) <= 4 * math.sqrt(agree * (1 - agree) / 4096)
    if agree == 0.0:
        same = sum(target.state(c) % 64 == speculator.state(c) % 64 for c in contexts)
        assert same == pytest.approx(4096 / 64, abs=4 * 8)


def test_another_seed_is_another_model():
    first, second = ToyModel(ToyParameters(seed=0)), ToyModel(ToyParameters(seed=1))
    assert not any(first.state([a]) == second.state([a]) for a in range(64))


def test_every_process_has_the_same_model():
    code = (
        "from ipc.toy import ToyParameters\n"
        "from workers.engines.toy import ToyModel\n"
        "print(ToyModel(ToyParameters(seed=3, agree=0.5)).state([1, 2, 3]))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, timeout=60
    )
    assert int(done.stdout) == ToyModel(ToyParameters(seed=3, agree=0.5)).state([1, 2, 3])


def test_a_window_gives_the_rows_that_single_steps_give():
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    whole, steps = engine(), engine()
    whole.open(0)
    steps.open(0)
    rows = whole.forward([Window(0, 0, tokens, 8)])
    assert rows == [steps.forward([Window(0, i, tokens[i : i + 1], 1)])[0] for i in range(8)]
    assert rows == [whole.model.state(tokens[: i + 1]) for i in range(8)]


def test_rows_come_in_the_order_of_the_windows():
    both = engine()
    both.open(0)
    both.open(1)
    rows = both.forward([Window(1, 0, [1, 2, 3], 2), Window(0, 0, [4], 0), Window(0, 1, [5], 1)])
    assert rows == [both.model.state(context) for context in ([1, 2], [1, 2, 3], [4, 5])]


def test_what_is_held_beyond_the_start_is_dropped():
    rolled_back = engine()
    rolled_back.open(0)
    rolled_back.forward([Window(0, 0, [1, 2, 3, 4], 0)])
    assert rolled_back.forward([Window(0, 2, [9], 1)]) == [rolled_back.model.state([1, 2, 9])]
    with pytest.raises(ValueError, match="sequence 0: window starts at 4, but 3 tokens are held"):
        rolled_back.forward([Window(0, 4, [1], 1)])


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (Window(5, 0, [1], 1), KeyError, "sequence 5 is not open"),
        (Window(0, 1, [1], 1), ValueError, "starts at 1, but 0 tokens are held"),
        (Window(0, -1, [1], 1), ValueError, "starts at -1, but 0 tokens are held"),
        (Window(0, 0, [1] * 9, 1), ValueError, "9 tokens, but at most 8 fit"),
        (Window(0, 0, [1], 2), ValueError, "2 rows of logits wanted from 1 tokens"),
        (Window(0, 0, [1, 64], 1), ValueError, "token 64 is outside the vocabulary of 64"),
        (Window(0, 0, [-1], 1), ValueError, "token -1 is outside the vocabulary of 64"),
    ],
)
def test_a_window_that_cannot_be_run_is_refused(window, error, message):
    refusing = engine("vocabulary=64,context=8")
    refusing.open(0)
    with pytest.raises(error, match=message):
        refusing.forward([window])
    assert refusing.forward([Window(0, 0, [1] * 8, 1)]) == [refusing.model.state([1] * 3)]


def test_sequences_are_limited_and_their_places_are_used_again():
    full = engine(max_sequences=2)
    full.open(10)
    full.open(11)
    with pytest.raises(MemoryError, match="no room for sequence 12: max_sequences=2 are open"):
        full.open(12)
    with pytest.raises(ValueError, match="sequence 11 is open already"):
        full.open(11)
    full.close(10)
    with pytest.raises(KeyError, match="sequence 10 is not open"):
        full.close(10)
    full.open(12)


def test_greedy_takes_the_favourite_unless_it_may_not_stop_yet():
    stopping = engine()
    stopping.open(0)
    (state,) = stopping.forward([Window(0, 0, [1], 1)])
    favourite = stopping.model.favourite(state)
    logits = stopping.model.logits(state)
    logits[favourite] = -math.inf
    stop = {"temperature": 0.0, "stop_token_ids": (favourite,), "min_tokens": 3}
    early, late = stopping.sample([state, state], [draw(generated=2, **stop), draw(generated=3, **stop)])
    assert (early.token, late.token) == (logits.index(max(logits)), favourite)
    (reported,) = stopping.sample([state], [draw(temperature=0.0, logprobs=1)])
    assert reported.top == ((favourite, reported.logprob),)


def test_probabilities_are_those_of_the_logits():
    probabilities = engine("vocabulary=5").exact_probabilities([1, 2], 0.5)
    model = ToyModel(ToyParameters(vocabulary=5))
    weights = [math.exp(logit / 0.5) for logit in model.logits(model.state([1, 2]))]
    assert probabilities == pytest.approx([weight / sum(weights) for weight in weights])
    assert sum(probabilities) == pytest.approx(1.0)


def test_a_step_lasts_until_its_deadline_and_is_awake_at_its_end(monkeypatch):
    clock = SimpleNamespace(now=100.0, slept=[])

    def sleep(seconds):
        clock.slept.append(seconds)
        clock.now += seconds / 2 if len(clock.slept) == 1 else seconds  # the first sleep ends early

    def monotonic():
        clock.now += 1e-5
        return clock.now

    monkeypatch.setattr(toy, "time", SimpleNamespace(monotonic=monotonic, sleep=sleep))
    slow = engine("step_ms=8,row_us=1000")
    slow.open(0)
    slow.forward([Window(0, 0, [1, 2, 3], 2)])
    assert clock.now == pytest.approx(100.010, abs=3e-5)
    assert clock.slept == pytest.approx([0.0096, 0.0048], abs=3e-5)


def test_greedy_text_is_the_same_with_any_draft():
    plain, drafted = engine(), engine()
    plain.open(0)
    drafted.open(0)
    text = [1]
    for _ in range(6):
        text += greedy(plain, 0, len(text) - 1, text[-1:], 1)
    assert greedy(drafted, 0, 0, [*text[:4], 0, 0], 3)[0] == text[4]
    assert greedy(drafted, 0, 4, text[4:6], 2) == text[5:7]
