"""Forms of text: what is refused before it runs."""

from __future__ import annotations

import json

import pytest

from executor import Grammar, InvalidRequest, SamplingParams


@pytest.mark.parametrize(
    ("kind", "value", "says"),
    [
        (
            "regexp",
            "a",
            "its kind must be one of json_object, json_schema, regex, choice, grammar, got 'regexp'",
        ),
        ("regex", "[0-9", "regex cannot be followed: .*unclosed character class"),
        ("regex", 5, r"regex must be a regular expression, got 5; try \[0-9\]\+"),
        ("json_schema", "{", "json_schema is no JSON Schema"),
        ("json_schema", [1], "json_schema must be a JSON Schema, as text or a dictionary"),
        ("json_schema", {"type": "nonsense"}, "json_schema cannot be followed: .*nonsense"),
        ("choice", [], "choice must be a list of texts that are not empty"),
        ("choice", ["a", ""], "choice must be a list of texts that are not empty"),
        ("grammar", "start: %", "grammar cannot be followed"),
        ("regex", "a" * 70000, "regex is longer than 65536 bytes"),
    ],
)
def test_what_cannot_be_followed_is_refused(kind, value, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        Grammar(kind, value)
    assert refused.value.field == "grammar"


def test_all_kinds():
    for grammar in (
        Grammar("json_object"),
        Grammar("json_schema", {"type": "integer"}),
        Grammar("json_schema", '{"type": "integer"}'),
        Grammar("regex", "a/b"),
        Grammar("choice", ["yes", 'n"ö']),
        Grammar("grammar", 'start: "a" | "b"'),
    ):
        assert SamplingParams(grammar=grammar).constrained


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("presence_penalty", 2.1, "at least -2 and at most 2"),
        ("frequency_penalty", float("nan"), "at least -2 and at most 2"),
        ("repetition_penalty", 0, "above 0 and at most 10"),
        ("logit_bias", [1], "must map token ids to numbers"),
        ("logit_bias", {"1": 1}, "must be a whole number from 0"),
        ("logit_bias", {1: 101}, "at least -100 and at most 100"),
        ("allowed_token_ids", [], "allowed_token_ids is empty"),
        ("allowed_token_ids", [-1], "must be a whole number from 0"),
        ("bad_words", [""], "bad words must be non-empty text"),
        ("bad_words", 5, "bad_words must be a list of texts"),
        ("grammar", "[0-9]+", r"grammar must be a Grammar, .* try Grammar\('regex', '\[0-9\]\+'\)"),
    ],
)
def test_a_bad_value_is_refused_by_name(field, value, says):
    with pytest.raises(InvalidRequest, match=says) as refused:
        SamplingParams(**{field: value})
    assert refused.value.field == field


def test_neutral_values_constrain_nothing():
    assert not SamplingParams().constrained
    assert not SamplingParams(presence_penalty=0, repetition_penalty=1, logit_bias={}).constrained
    assert SamplingParams(bad_words="no").bad_words == ("no",)


def test_json_is_in_one_line_unless_its_schema_says_otherwise():
    one_line = json.loads(Grammar("json_schema", {"type": "object"}).compiled)
    assert one_line["grammars"][0]["json_schema"]["x-guidance"]["whitespace_flexible"] is False
    own = {"type": "object", "x-guidance": {"whitespace_flexible": True}}
    kept = json.loads(Grammar("json_schema", own).compiled)
    assert kept["grammars"][0]["json_schema"]["x-guidance"]["whitespace_flexible"] is True
