"""Any valid fields mean the same for a real model with and without speculation, to the last bit."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, ask, served
from smollm2_fields import PROMPTS, VALID

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(1800)]

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}


Short = Annotated[str, msgspec.Meta(max_length=10)]
Small = Annotated[int, msgspec.Meta(ge=0, le=99)]


class Form(msgspec.Struct, forbid_unknown_fields=True):
    """What an answer must be; its schema is what is asked for, its type what is checked."""


class Person(Form):
    name: Short
    age: Small


class Colours(Form):
    colours: Annotated[list[Literal["red", "green", "blue"]], msgspec.Meta(min_length=1, max_length=3)]


class Verdict(Form):
    right: bool
    because: Literal["luck", "skill"] | None


class Place(Form):
    street: Short
    number: Small
    owner: Person


class Sums(Form):
    terms: Annotated[list[Small], msgspec.Meta(min_length=2, max_length=4)]


FORMS = (Person, Colours, Verdict, Place, Sums)
SEEDS, AT_ONCE = 5, 4  # of each form: a few at a time, so that no answer keeps its client waiting for long


@pytest.fixture(scope="module")
def both(smollm2: Path, runtime_directory: Path) -> Iterator[tuple[Served, Served]]:
    """With the shipped head and lookups, and without a speculator."""
    config = {"engine": "native", "target": str(smollm2), "dtype": "fp32", "max_model_len": 256}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
        with served(**config, speculator="cascade") as drafting, served(**config, speculator="off") as plain:
            for each in (drafting, plain):  # its thread for long thoughts stays
                ask(each.url, COMPLETE, {"prompt": "1", "structured_outputs": {"regex": "[0-9]"}})
            yield drafting, plain


def examples(count: int) -> settings:
    return settings(
        max_examples=count, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


def same(both: tuple[Served, Served], fields: dict[str, Any]) -> None:
    answers = [ask(each.url, COMPLETE, fields) for each in both]
    assert [answer.status for answer in answers] == [200, 200], answers
    assert answers[0].body["choices"] == answers[1].body["choices"]
    assert answers[0].body["usage"] == answers[1].body["usage"]


@examples(100)
@given(VALID, st.integers(1, 40))
def test_much_that_is_valid_gives_the_same(both, fields, max_tokens):
    same(both, fields | {"max_tokens": max_tokens})


def test_a_hundred_answers_of_a_hundred_have_their_form(both):
    valid = accepted = 0
    for form, seed in itertools.product(FORMS, range(SEEDS)):
        schema = {"name": form.__name__, "schema": msgspec.json.schema(form)}
        body = {
            "messages": [{"role": "user", "content": f"Make up a {form.__name__.lower()} as JSON."}],
            "response_format": {"type": "json_schema", "json_schema": schema},
            **{"seed": seed, "temperature": 1.0, "n": AT_ONCE, "max_tokens": 160},
        }
        drafting, plain = (ask(each.url, CHAT, body).body for each in both)
        assert drafting["choices"] == plain["choices"]
        accepted += drafting["metrics"]["speculative_decoding"]["num_accepted_tokens"]
        for choice in drafting["choices"]:
            assert choice["finish_reason"] == "stop"
            valid += isinstance(msgspec.json.decode(choice["message"]["content"], type=form), form)
    assert valid == 100
    assert accepted > 0


def test_speculation_was_at_work(both):
    drafting, plain = both
    fields = {"prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0}
    assert ask(drafting.url, COMPLETE, fields).body["metrics"]["speculative_decoding"]["num_accepted_tokens"]
    assert not ask(plain.url, COMPLETE, fields).body["metrics"]["speculative_decoding"]["num_draft_tokens"]


def test_what_the_models_own_template_has_no_place_for(both):
    """SmolLM2's knows neither tools nor names."""
    hello: Any = {"role": "user", "content": "hi"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with openai.OpenAI(base_url=f"{both[0].url}/v1", api_key="none", max_retries=0) as api:
        for body, field in (
            ({"messages": [hello], "tools": [TOOL]}, "tools"),
            ({"messages": [hello | {"name": "Ada"}]}, "messages[0].name"),
            (
                {"messages": [hello, {"role": "assistant", "content": "", "tool_calls": [call]}]},
                "messages[1].tool_calls",
            ),
            ({"messages": [hello, {"role": "assistant", "tool_calls": [call]}]}, "messages"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                api.chat.completions.create(model=both[0].llm.config.target, max_tokens=1, **body)
            assert refused.value.param == field
        unused = api.chat.completions.create(
            model=both[0].llm.config.target, max_tokens=1, messages=[hello], tools=[TOOL], tool_choice="none"
        )
        assert unused.usage.completion_tokens == 1
