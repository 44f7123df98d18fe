"""Any field with any value: valid ones mean the same with and without speculation, others are 400."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, ask, served

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


def few(examples: int) -> settings:
    """`no_leak` may run once for all examples."""
    return settings(
        max_examples=examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


BIG = 1 << 70

_text = st.text(max_size=8)
_no_bool = st.one_of(st.integers(0, 9), _text, st.lists(st.integers(), max_size=2))
_no_object = st.one_of(st.integers(), _text.filter(bool), st.booleans())
_no_number = st.one_of(_text, st.booleans(), st.lists(st.integers(), max_size=2), st.just({}))
_no_whole = st.one_of(_no_number, st.floats(0.1, 0.9))
_no_list = st.one_of(st.integers(), _text, st.booleans(), st.just({}))


def _outside(low: float, high: float) -> st.SearchStrategy[Any]:
    below = st.floats(max_value=low, exclude_max=True, allow_infinity=False)
    return st.one_of(below, st.floats(min_value=high, exclude_min=True, allow_infinity=False), _no_number)


def _beyond(low: int, high: int) -> st.SearchStrategy[Any]:
    return st.one_of(st.integers(-BIG, low - 1), st.integers(high + 1, BIG), _no_whole)


SHARED: dict[str, st.SearchStrategy[Any]] = {
    "n": _beyond(1, 128),
    "temperature": _outside(0, 100),
    "top_p": st.one_of(_outside(0, 1), st.just(0)),
    "top_k": _beyond(-1, 1 << 31),
    "min_p": _outside(0, 1),
    "prompt_logprobs": _beyond(0, 20),
    "seed": _beyond(0, (1 << 63) - 1),
    "max_tokens": _beyond(1, 1 << 31),
    "min_tokens": _beyond(0, 20),
    "ignore_eos": _no_bool,
    "stop": st.one_of(
        st.just(""), st.just(["a", ""]), st.integers(), st.lists(st.integers(), min_size=1, max_size=2)
    ),
    "stop_token_ids": st.one_of(_no_list, st.lists(_beyond(0, 255), min_size=1, max_size=3)),
    "presence_penalty": _outside(-2, 2),
    "frequency_penalty": _outside(-2, 2),
    "repetition_penalty": st.one_of(_outside(0, 10), st.just(0)),
    "logit_bias": st.one_of(
        _no_object,
        st.dictionaries(st.sampled_from(["a", "-1", "1.5", "²", "256"]), st.just(1), min_size=1),
        st.fixed_dictionaries({"7": _outside(-100, 100)}),
    ),
    "allowed_token_ids": st.one_of(_no_list, st.just([]), st.lists(_beyond(0, 255), min_size=1, max_size=3)),
    "bad_words": st.one_of(
        _no_list, st.just([""]), st.lists(st.integers(), min_size=1, max_size=2), st.just(["x"] * 257)
    ),
    "response_format": st.one_of(_no_object, st.fixed_dictionaries({"type": _text})),
    "structured_outputs": st.one_of(_no_object, st.fixed_dictionaries({"xml": _text})),
    "stream": _no_bool,
    "stream_options": st.one_of(_no_object, st.fixed_dictionaries({"usage": st.booleans()})),
    "user": st.integers(),
    "model": st.one_of(st.integers(), st.booleans()),
}
OF_CHATS: dict[str, st.SearchStrategy[Any]] = SHARED | {
    "messages": st.one_of(
        _no_list, st.lists(_no_object, min_size=1, max_size=2), st.just([]), st.just([{"role": 1}])
    ),
    "max_completion_tokens": _beyond(1, 1 << 31),
    "logprobs": _no_bool,
    "top_logprobs": st.one_of(_beyond(0, 20), st.integers(0, 20)),
    "tools": _no_list,
    "tool_choice": _no_bool,
}
OF_COMPLETIONS: dict[str, st.SearchStrategy[Any]] = SHARED | {
    "prompt": st.one_of(
        *(st.integers(), st.just(""), st.just([]), st.just([[]]), st.just(["a", ""]), st.just([256])),
        *(st.just([-1]), st.just([BIG]), st.just([1.5]), st.just([{}]), st.just(["a", [1]])),
    ),
    "logprobs": _beyond(0, 20),
    "echo": _no_bool,
}
_unknown = st.text(min_size=1, max_size=12).filter(lambda name: name not in OF_CHATS | OF_COMPLETIONS)


@pytest.fixture(scope="module")
def toys(runtime_directory: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
        with served() as toys:
            yield toys


@pytest.fixture(scope="module")
def plain(toys: Served, runtime_directory: Path) -> Iterator[Served]:
    """The same without a speculator."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
        with served(speculator="off") as plain:
            yield plain


@st.composite
def invalid(draw: Any, fields: dict[str, st.SearchStrategy[Any]]) -> tuple[str, Any]:
    name = draw(st.sampled_from(sorted(fields)))
    return name, draw(fields[name])


@few(150)
@given(st.data())
def test_what_is_invalid_is_refused_with_its_name(toys, data):
    path, valid, fields = data.draw(
        st.sampled_from(
            [
                (CHAT, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}, OF_CHATS),
                (COMPLETE, {"prompt": "x", "max_tokens": 2}, OF_COMPLETIONS),
            ]
        )
    )
    name, value = data.draw(invalid(fields))
    answer = ask(toys.url, path, valid | {name: value})
    assert answer.status == 400, answer
    param = answer.error["param"]
    assert param == name or param.startswith((f"{name}.", f"{name}[")), answer


@few(30)
@given(_unknown, st.one_of(st.none(), st.integers(), _text))
def test_what_is_unknown_is_refused_with_its_name(toys, name, value):
    answer = ask(toys.url, COMPLETE, {"prompt": "x", "max_tokens": 2, name: value})
    assert (answer.status, answer.error["param"]) == (400, name)
    assert answer.error["code"] == "unknown_field"


@few(60)
@given(st.binary(max_size=60))
def test_any_bytes_are_no_defect(toys, data):
    assert ask(toys.url, COMPLETE, data).status == 400


_valid = st.fixed_dictionaries(
    {"seed": st.integers(0, (1 << 63) - 1), "max_tokens": st.integers(1, 24)},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.floats(0, 3),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 300),
        "min_p": st.floats(0, 1),
        "stop": st.one_of(st.text("abcXYZ!", min_size=1, max_size=2), st.lists(st.just("A"), max_size=2)),
        "stop_token_ids": st.lists(st.integers(0, 255), max_size=3),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "logit_bias": st.dictionaries(st.integers(0, 255).map(str), st.floats(-100, 100), max_size=3),
        "allowed_token_ids": st.lists(st.integers(0, 255), min_size=1, max_size=9, unique=True),
        "bad_words": st.lists(st.text("abc", min_size=1, max_size=2), max_size=2),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "echo": st.booleans(),
        "user": _text,
    },
)


@few(25)
@given(_valid)
def test_what_is_valid_gives_the_same_with_and_without_speculation(toys, plain, fields):
    answers = [ask(each.url, COMPLETE, {"prompt": "some prompt"} | fields) for each in (toys, plain)]
    assert [answer.status for answer in answers] == [200, 200], answers
    assert answers[0].body["choices"] == answers[1].body["choices"]
    assert answers[0].body["usage"] == answers[1].body["usage"]
