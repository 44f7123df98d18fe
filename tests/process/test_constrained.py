"""Penalties, bias, bans and grammars: honoured at every draft position, so speculation changes no token."""

from __future__ import annotations

import json
import re
import string

import pytest

from executor import LLM, Grammar, InvalidRequest, SamplingParams

PROMPTS = ["one", "another one", "a third", "one"]
CONSTRAINTS = {
    "penalties": {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.5},
    "rewards": {"presence_penalty": -2.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {5: 6.0, 17: -100.0, 3: 2.0}},
    "allowed": {"allowed_token_ids": [3, 5, 8, 13, 21, 34], "min_tokens": 10, "stop_token_ids": [5]},
    "bad words": {"bad_words": [*string.ascii_lowercase, "one"]},
    "all": {
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {7: 3.0},
        "allowed_token_ids": list(range(0, 128, 2)),
        "bad_words": ["x"],
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_same_tokens_with_and_without_speculation(name, temperature):
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=3, **CONSTRAINTS[name])
    free = SamplingParams(max_tokens=40, temperature=temperature, seed=3)
    outputs = []
    for speculator in ("off", "vocabulary=128,agree=0.8", "ngram"):
        with LLM(engine="toy", target="vocabulary=128", speculator=speculator, threads=1) as llm:
            done = llm.generate(PROMPTS, [params, params, params, free])
            outputs.append([each.token_ids for each in done])
            if "agree" in speculator:
                assert max(each.acceptance_length for each in done) > 1.0
    assert outputs[0] == outputs[1] == outputs[2]
    assert outputs[0][0] != outputs[0][3]  # it does something
    for tokens in outputs[0][:3]:
        if allowed := CONSTRAINTS[name].get("allowed_token_ids"):
            assert set(tokens) <= set(allowed)
        if name == "bad words":
            assert not set(map(ord, string.ascii_lowercase)) & set(tokens)


def test_contradictions_do_not_fail_the_lane():
    params = SamplingParams(max_tokens=5, temperature=0, allowed_token_ids=[97], bad_words=["a"])
    with LLM(engine="toy", target="vocabulary=128", speculator="ngram", threads=1) as llm:
        assert llm.generate("b", params)[0].token_ids == [97] * 5
        assert sum(llm.coordinator.deaths.values()) == 0


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"logit_bias": {128: 1.0}}, "token 128 is not in the vocabulary, 0 to 127"),
        ({"allowed_token_ids": [1, 200]}, "token 200 is not in the vocabulary"),
        ({"grammar": Grammar("regex", "a")}, "a toy's tokens are no text; use --engine native"),
    ],
)
def test_what_the_model_cannot_do_is_refused(params, says):
    with pytest.raises(InvalidRequest, match=says):
        LLM(engine="toy", target="vocabulary=128").encode("a", SamplingParams(**params))


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "rain", "maps"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMS = {
    "schema": Grammar("json_schema", PERSON),
    "regex": Grammar("regex", "(ab|cd)+-[0-9]{3}"),
    "choice": Grammar("choice", ["yes, of course", "no, never"]),
    "lark": Grammar("grammar", 'start: "<" /[a-z ]{5,30}/ ">"'),
}


@pytest.mark.model
def test_grammars_are_followed_and_speculation_changes_no_token(thin):
    question = [{"role": "user", "content": "Give me a person as JSON, with name, age and likes."}]
    outputs: dict[str, list[list[int]]] = {}
    texts: dict[str, list[str]] = {name: [] for name in FORMS}
    for speculator in ("ngram", "off"):
        outputs[speculator] = []
        with LLM(target=str(thin), speculator=speculator, threads=1, max_model_len=256) as llm:
            for name, grammar in FORMS.items():
                params = SamplingParams(max_tokens=80, temperature=0.9, seed=1, grammar=grammar)
                done = llm.chat(question, params)
                assert done.finish_reason == "stop"
                texts[name].append(done.text)
                outputs[speculator].append(done.token_ids)
    assert outputs["ngram"] == outputs["off"]
    for text in texts["schema"]:
        person = json.loads(text)
        assert person.keys() == {"name", "age", "likes"}
        assert 0 <= person["age"] <= 120
        assert set(person["likes"]) <= {"tea", "rain", "maps"}
    assert all(re.fullmatch("(ab|cd)+-[0-9]{3}", text) for text in texts["regex"])
    assert set(texts["choice"]) <= {"yes, of course", "no, never"}
    assert all(re.fullmatch("<[a-z ]{5,30}>", text) for text in texts["lark"])


@pytest.mark.model
def test_a_target_that_dies_in_a_grammar_takes_it_up_where_it_was(thin):
    params = SamplingParams(max_tokens=80, temperature=0.9, seed=1, grammar=FORMS["schema"])
    with LLM(target=str(thin), speculator="ngram", threads=1, max_model_len=256) as llm:
        undisturbed = llm.generate("A person:", params)[0]
        tokens = []
        for delta in llm.stream("A person:", params):
            if not tokens:
                llm.coordinator.lanes[0].process.kill()
            tokens += delta.token_ids
    assert tokens == undisturbed.token_ids
    json.loads(undisturbed.text)
