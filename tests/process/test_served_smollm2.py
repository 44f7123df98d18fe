"""A real model over HTTP, by the official client: text, characters of several bytes, schemas, tools."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import openai
import pytest
from serving import Served, served

from executor import SamplingParams
from executor.errors import InvalidRequest
from executor.model import CheckpointText

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

ASKED: list[Any] = [{"role": "user", "content": "Repeat after me: né à Zürich, 日本語, 🎉🎉."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TEMPLATE = """{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"""


def test_a_real_model(smollm2: Path):
    config = {"engine": "native", "target": str(smollm2), "speculator": "ngram", "dtype": "fp32"}
    with (
        served({"model_name": "smollm2"}, **config, max_model_len=512) as real,
        openai.OpenAI(base_url=f"{real.url}/v1", api_key="none", max_retries=0) as api,
    ):
        a_streamed_chat_is_the_executors_own(real, api)
        tokens_of_half_a_character_are_no_text(api)
        answers_follow_a_schema_with_and_without_speculation(real, api)


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


def test_tools_reach_a_template_that_has_a_place_for_them(smollm2, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        if (smollm2 / name).exists():
            shutil.copy(smollm2 / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    text = CheckpointText(tmp_path)
    said = text.decode(text.encode_chat([{"role": "user", "content": "hi"}], [TOOL]))
    assert said == "[get_weather]user: hi"


def test_tools_are_refused_by_a_template_that_has_none(smollm2):
    with pytest.raises(InvalidRequest, match="no place for tools"):
        CheckpointText(smollm2).encode_chat([{"role": "user", "content": "hi"}], [TOOL])
