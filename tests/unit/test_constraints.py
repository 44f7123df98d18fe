"""What a sequence may be sampled, against a plain statement of the rule; drafts cannot change it."""

from __future__ import annotations

import math

import numpy as np
import torch
from draws import NEUTRAL
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.messages import ConstraintSpec, SamplingSpec
from workers.constraints import Constraints
from workers.engines.engine import Draw
from workers.pure_sampler import sample_row
from workers.sampler import Sampler

SIZE = 12
TOKENS = st.integers(0, SIZE - 1)
F = np.float32


def spec(**changes) -> ConstraintSpec:
    neutral = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (),
        "allowed_token_ids": (),
        "bad_words": (),
        "grammar": "",
        "end_token_ids": (),
    }
    return ConstraintSpec(**neutral | changes)


def constraints(its: ConstraintSpec, prompt_len: int = 1, **sampling) -> Constraints:
    return Constraints(its, SamplingSpec(**NEUTRAL | sampling), prompt_len, SIZE, None)


def after(its: ConstraintSpec, tokens, logits=None, **sampling) -> list[float]:
    """The row after `tokens`, the first of which is the prompt."""
    (edit,) = constraints(its, **sampling).edits(tokens, [], rows=1)
    row = np.zeros(SIZE, F) if logits is None else np.array(logits, F)
    return edit.applied(row).tolist()


def barred(row) -> set[int]:
    return {token for token, logit in enumerate(row) if logit == -math.inf}


def test_presence_counts_once_and_frequency_each_time_but_not_the_prompt():
    row = after(spec(presence_penalty=0.5, frequency_penalty=0.25), [7, 3, 3, 4])
    assert (row[3], row[4], row[7], row[0]) == (-1.0, -0.75, 0.0, 0.0)


def test_repetition_counts_the_prompt_too_and_pulls_towards_minus_infinity():
    row = after(spec(repetition_penalty=2.0), [7, 3], logits=[1.0] * 6 + [-1.0] * 6)
    assert (row[3], row[7], row[0], row[8]) == (0.5, -2.0, 1.0, -1.0)


def test_bias_comes_before_the_repetition_penalty():
    assert after(spec(repetition_penalty=2.0, logit_bias=((3, 4.0),)), [7, 3])[3] == 2.0


def test_bad_words_bar_their_last_token_only_where_they_would_come_about():
    words = spec(bad_words=((1, 2), (5,), (3, 4, 6)))
    assert barred(after(words, [0, 1])) == {2, 5}
    assert barred(after(words, [0, 3, 4])) == {5, 6}
    assert barred(after(words, [0, 4])) == {5}


def test_what_is_not_allowed_is_barred():
    assert barred(after(spec(allowed_token_ids=(2, 3, SIZE + 5)), [0])) == set(range(SIZE)) - {2, 3}


def test_stop_tokens_are_barred_while_the_text_is_short():
    its = spec(presence_penalty=1.0)
    stops = {"stop_token_ids": (2, SIZE + 9), "min_tokens": 2}
    assert barred(after(its, [0, 1], **stops)) == {2}
    assert barred(after(its, [0, 1, 1], **stops)) == set()


def test_bans_that_would_leave_nothing_are_dropped():
    its = spec(allowed_token_ids=(2,), bad_words=((2,),))
    assert barred(after(its, [0])) == set(range(SIZE)) - {2}


@st.composite
def cases(draw):
    its = spec(
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.5])),
        logit_bias=tuple(draw(st.dictionaries(TOKENS, st.sampled_from([-100.0, 2.5]), max_size=3)).items()),
        allowed_token_ids=tuple(draw(st.lists(TOKENS, max_size=4))),
        bad_words=tuple(map(tuple, draw(st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=3)))),
    )
    tokens = draw(st.lists(TOKENS, min_size=2, max_size=12))
    draft = draw(st.lists(TOKENS, max_size=5))
    sampling = {
        "stop_token_ids": tuple(draw(st.lists(TOKENS, max_size=2))),
        "min_tokens": draw(st.integers(0, 8)),
        "temperature": draw(st.sampled_from([0.0, 0.8])),
        "seed": draw(st.integers(0, 99)),
    }
    return its, tokens, draft, sampling


def plain(its: ConstraintSpec, sampling: SamplingSpec, tokens, prompt_len: int, row) -> list[float]:
    """The rule, token by token."""
    output = tokens[prompt_len:]
    edited = []
    for token, logit in enumerate(row):
        value = F(logit) + F(dict(its.logit_bias).get(token, 0.0))
        if token in tokens and its.repetition_penalty != 1.0:
            value = value / F(its.repetition_penalty) if value > 0 else value * F(its.repetition_penalty)
        count = output.count(token)
        value = value - (F(count) * F(its.frequency_penalty) + F(count > 0) * F(its.presence_penalty))
        edited.append(float(value))
    allowed = {token for token in range(SIZE) if not its.allowed_token_ids or token in its.allowed_token_ids}
    banned = set(sampling.stop_token_ids) if len(output) < sampling.min_tokens else set()
    for word in its.bad_words:
        if tokens[len(tokens) - len(word) + 1 :] == list(word[:-1]) or len(word) == 1:
            banned.add(word[-1])
    left = allowed - banned or allowed
    return [value if token in left else -math.inf for token, value in enumerate(edited)]


@settings(max_examples=300, derandomize=True, deadline=None)
@given(cases(), st.data())
def test_any_combination_is_the_plain_rule_at_each_position(case, data):
    its, tokens, draft, sampling = case
    prompt_len = data.draw(st.integers(1, len(tokens)))
    made = constraints(its, prompt_len, **sampling)
    row = np.linspace(-2, 3, SIZE).astype(F)
    edits = made.edits(tokens, draft, rows=len(draft) + 1)
    for i, edit in enumerate(edits):
        told = [*tokens, *draft[:i]]
        wanted = plain(its, SamplingSpec(**NEUTRAL | sampling), told, prompt_len, row)
        assert edit.applied(row).tolist() == wanted
        (alone,) = constraints(its, prompt_len, **sampling).edits(told, [], rows=1)
        assert alone.applied(row).tolist() == wanted
    (last,) = made.edits(tokens, draft, rows=1)
    assert last.applied(row).tolist() == edits[-1].applied(row).tolist()


@settings(max_examples=200, derandomize=True, deadline=None)
@given(cases())
def test_tensors_and_the_pure_rule_draw_the_same_token(case):
    its, tokens, _, sampling = case
    (edit,) = constraints(its, **sampling).edits(tokens, [], rows=1)
    how = Draw(SamplingSpec(**NEUTRAL | sampling | {"logprobs": 2}), len(tokens), len(tokens) - 1, edit)
    row = np.linspace(-2, 3, SIZE).astype(F)
    (sample,) = Sampler(SIZE, "cpu").sample(torch.from_numpy(row[None]), [how])
    wanted = sample_row(row.tolist(), how)
    assert (sample.token, [i for i, _ in sample.top]) == (wanted.token, [i for i, _ in wanted.top])
