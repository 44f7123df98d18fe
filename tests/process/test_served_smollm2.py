"""A real model over HTTP, by the official client: text, characters of several bytes, schemas, tools."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest
from serving import Served, ask, served
from smollm2_fields import some

from executor import SamplingParams
from executor.errors import InvalidRequest
from executor.model import CheckpointText

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
RESULT = {"role": "tool", "tool_call_id": "1", "content": "22"}
ASKED: list[Any] = [{"role": "user", "content": "Repeat after me: né à Zürich, 日本語, 🎉🎉."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}
TEMPLATE = """{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{%- for call in message.tool_calls %}<{{ call.function.name }}>{% endfor %}
{%- endfor %}"""


@pytest.fixture(scope="module")
def with_tools(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a template of ours."""
    directory = tmp_path_factory.mktemp("with-tools")
    for file in smollm2.iterdir():
        (directory / file.name).symlink_to(file)
    (directory / "chat_template.jinja").unlink(missing_ok=True)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def test_a_real_model(with_tools: Path):
    config = {"engine": "native", "target": str(with_tools), "speculator": "ngram", "dtype": "fp32"}
    with (
        served({"model_name": "smollm2"}, **config, max_model_len=512) as real,
        openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as api,
    ):
        a_streamed_chat_is_the_executors_own(real, api)
        tokens_of_half_a_character_are_no_text(api)
        tools_reach_the_model(real, api)
        prompts_are_scored_as_generated_text_is(real, api)
        bodies = some(6)
        speculated = [answered(real, body) for body in bodies]
        answers_follow_a_schema_with_and_without_speculation(real, api)
        assert real.llm.speculation == "off"
        for body, told in zip(bodies, speculated, strict=True):
            assert answered(real, body) == told, body


def a_streamed_chat_is_the_executors_own(real: Served, api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": ASKED, "seed": 5, "temperature": 0.0}
    whole = api.chat.completions.create(**asked, max_tokens=40)
    stream = api.chat.completions.create(**asked, max_tokens=40, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    own = real.llm.chat(ASKED, SamplingParams(seed=5, temperature=0.0, max_tokens=40))
    assert "".join(pieces) == whole.choices[0].message.content == own.text
    assert whole.usage.completion_tokens == len(own.token_ids)
    assert whole.metrics["speculative_decoding"]["num_drafts"] > 0


def tokens_of_half_a_character_are_no_text(api: openai.OpenAI) -> None:
    """Streamed text never shows halves of a character; their bytes are in the logprobs."""
    prompt = "🎉 日本 🎉 日本 🎉 日本"
    asked: dict[str, Any] = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 16}
    text = "".join(chunk.choices[0].text for chunk in api.completions.create(**asked, stream=True))
    assert "🎉" in text
    assert "\ufffd" not in text.rstrip("\ufffd")
    chat = api.chat.completions.create(
        model="smollm2", messages=ASKED, temperature=0, max_tokens=30, logprobs=True, top_logprobs=1
    )
    (choice,) = chat.choices
    spelled = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
    assert spelled.decode(errors="replace").startswith(choice.message.content.rstrip("\ufffd"))


def tools_reach_the_model(real: Served, api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "smollm2", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    told = api.chat.completions.create(**asked, tools=[TOOL], tool_choice="auto")
    for said, usage in (
        ("[get_weather]user: hi", told.usage),
        ("user: hi", api.chat.completions.create(**asked, tools=[TOOL], tool_choice="none").usage),
    ):
        assert usage.prompt_tokens == len(real.llm.text.encode(said))
    (own,) = real.llm.generate(["[get_weather]user: hi"], SamplingParams(temperature=0, max_tokens=8))
    assert told.choices[0].message.content == own.text
    answered = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
    said = "user: hiassistant: <get_weather>tool: 22"
    usage = api.chat.completions.create(**asked | {"messages": answered}).usage
    assert usage.prompt_tokens == len(real.llm.text.encode(said))
    for wrong, field in (
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1]"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"messages": [HELLO[0] | {"name": "Ada"}]}, "messages[0].name"),
        ({"messages": [HELLO[0] | {"mood": "good"}]}, "messages[0].mood"),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            api.chat.completions.create(**asked | wrong)
        assert refused.value.param == field


def prompts_are_scored_as_generated_text_is(real: Served, api: openai.OpenAI) -> None:
    """To the last bit, though one comes of windows and the other of a prompt."""
    first = real.llm.text.encode("one two three one two three one")
    (own,) = real.llm.generate([first], SamplingParams(temperature=0, max_tokens=24, logprobs=2))
    asked: dict[str, Any] = {"model": "smollm2", "temperature": 0, "max_tokens": 1, "logprobs": 2}
    (echoed,) = api.completions.create(prompt=[*first, *own.token_ids], **asked, echo=True).choices
    lists = echoed.logprobs
    assert own.acceptance_length > 1
    assert lists.token_logprobs[len(first) : -1] == [entry.logprob for entry in own.logprobs]
    spelled = [real.llm.text.token_bytes(token).decode() for token in (*first, *own.token_ids)]
    assert lists.tokens[:-1] == spelled
    assert lists.text_offset[1] == len(spelled[0])


def answered(real: Served, body: dict[str, Any]) -> Any:
    answer = ask(real.url, "/v1/completions", body)
    assert answer.status == 200, (body, answer)
    return answer.body["choices"], answer.body["usage"]


def answers_follow_a_schema_with_and_without_speculation(real: Served, api: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Make up a person as JSON."}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
        "seed": 1,
        "n": 4,
        "max_tokens": 80,
    }
    speculated = [choice.message.content for choice in api.chat.completions.create(**asked).choices]
    for text in speculated:
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)
        assert len(person["name"]) <= 8
    real.llm.swap_speculator("off")
    plain = [choice.message.content for choice in api.chat.completions.create(**asked).choices]
    assert plain == speculated


@pytest.mark.parametrize(
    ("beside", "tools", "field"),
    [
        ({}, [TOOL], "tools"),
        ({"name": "Ada"}, [], "messages[1].name"),
        ({"tool_calls": [CALL]}, [], "messages[1].tool_calls"),
        ({"refusal": "no"}, [], "messages[1].refusal"),
    ],
)
def test_what_the_models_own_template_has_no_place_for_is_refused(smollm2, beside, tools, field):
    chat = [HELLO[0], {"role": "assistant", "content": "yes"} | beside]
    with pytest.raises(InvalidRequest, match="has no place for") as refused:
        CheckpointText(smollm2).encode_chat(chat, tools)
    assert refused.value.field == field
