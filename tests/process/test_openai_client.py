"""The official client, unchanged, against a real server: sync, async, streams, tools, errors."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
from serving import SLOW, Served, served, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
MODEL = "vocabulary=256"


def client(toys: Served, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{toys.url}/v1", **({"api_key": "none", "max_retries": 0} | options))


@pytest.fixture(scope="module")
def toys(runtime_directory: Path) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
        with served({"model_name": MODEL}) as toys:
            yield toys


def test_models_and_answers(toys):
    with client(toys) as api:
        assert [model.id for model in api.models.list()] == [MODEL]
        chat = api.chat.completions.create(model=MODEL, messages=HELLO, seed=3, max_completion_tokens=12)
        assert len(chat.choices[0].message.content) == chat.usage.completion_tokens == 12
        completion = api.completions.create(model=MODEL, prompt="hello", seed=3, max_tokens=12)
        assert completion.choices[0].text == chat.choices[0].message.content


def test_streams(toys):
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "seed": 3, "max_tokens": 30, "n": 2}
    with client(toys) as api:
        whole = api.chat.completions.create(**asked)
        texts = ["", ""]
        reasons: list[Any] = []
        usage = None
        stream = api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                reasons += [choice.finish_reason] if choice.finish_reason else []
            usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length", "length"]
    assert usage == whole.usage


def test_the_clients_own_helper_for_streams(toys):
    stops = {"stop_token_ids": list(range(128))}  # the helper takes an answer cut by its length for an error
    with (
        client(toys) as api,
        api.chat.completions.stream(model=MODEL, messages=HELLO, seed=3, extra_body=stops) as stream,
    ):
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == (text, "stop")


def test_async(toys):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{toys.url}/v1", api_key="none") as api:

            async def one(seed: int) -> str:
                stream = await api.completions.create(
                    model=MODEL, prompt="hello", seed=seed, max_tokens=20, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(one(seed) for seed in range(8)))

    texts = asyncio.run(run())
    with client(toys) as api:
        for seed, text in enumerate(texts):
            alone = api.completions.create(model=MODEL, prompt="hello", seed=seed, max_tokens=20)
            assert alone.choices[0].text == text


def test_errors_are_the_clients_own(toys):
    with client(toys) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as unknown:
            api.chat.completions.create(model=MODEL, messages=HELLO, extra_body={"beam_width": 3})
        assert (unknown.value.param, unknown.value.code) == ("beam_width", "unknown_field")
        with pytest.raises(openai.NotFoundError):
            api.chat.completions.create(model="gpt-5", messages=HELLO)


def test_limits_are_the_clients_own_errors():
    with served({"api_key": "sesame", "request_timeout": 0.3}, target=SLOW) as toys:
        with client(toys) as api, pytest.raises(openai.AuthenticationError):
            api.models.list()
        with client(toys, api_key="sesame") as api:
            with pytest.raises(openai.InternalServerError) as late:
                api.completions.create(model=SLOW, prompt="x", max_tokens=4000)
            assert late.value.status_code == 504
            stream = api.completions.create(model=SLOW, prompt="x", max_tokens=4000, stream=True)
            with pytest.raises(openai.APIError, match="no whole answer within"):
                list(stream)


def test_a_stream_that_is_closed_ends_in_both_lanes():
    with served(target=SLOW) as toys, client(toys) as api:
        with api.completions.create(model=SLOW, prompt="x", max_tokens=4000, stream=True) as stream:
            next(iter(stream))
            assert toys.llm.coordinator.load.running == 1
        wait_for(lambda: toys.llm.coordinator.load == (0, 0, 0))
        assert all(lane.told == {} for lane in toys.llm.coordinator.lanes)
