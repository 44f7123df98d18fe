"""Many clients at once: nothing is lost, mixed up or reordered, and those that leave leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
from contextlib import aclosing

from serving import ask, served, stream, wait_for

from executor import SamplingParams

STREAMS = 200
LEAVERS = 50
COMPLETE = "/v1/completions"
SMALL = {"target": "vocabulary=64", "speculator": "vocabulary=64,agree=0.8", "num_speculative_tokens": 2}
"""A toy computes every row of logits in Python."""


def length(i: int) -> int:
    return 4 + 7 * i % 24


def body(i: int) -> dict[str, object]:
    """Requests of unlike prompt, seed, length and sampling."""
    return {
        "prompt": f"prompt number {i}",
        "seed": i,
        "max_tokens": length(i),
        "temperature": (0.0, 0.0, 0.8)[i % 3],
        "stream": True,
    }


async def read(url: str, i: int) -> tuple[str, str]:
    """Text and reason of one stream."""
    text, reason = "", ""
    async with aclosing(stream(url, COMPLETE, body(i))) as events:
        async for event in events:
            if event == b"[DONE]":
                return text, reason
            choice = json.loads(event)["choices"][0]
            assert not reason, "nothing follows the end"
            text += choice["text"]
            reason = choice["finish_reason"] or ""
    raise AssertionError("the stream broke off")


async def leave(url: str, i: int, after: int) -> None:
    """Hang up after so many events."""
    asked = body(i) | {"max_tokens": 4000}
    async with aclosing(stream(url, COMPLETE, asked)) as events:
        async for _ in events:
            if after == 0:
                return
            after -= 1


def test_two_hundred_streams_at_once():
    with served({"max_queue": STREAMS}, max_sequences=64, **SMALL) as toys:

        async def run() -> list[tuple[str, str]]:
            return await asyncio.gather(*(read(toys.url, i) for i in range(STREAMS)))

        streamed = asyncio.run(run())
        params = [
            SamplingParams(seed=i, max_tokens=length(i), temperature=(0.0, 0.0, 0.8)[i % 3])
            for i in range(STREAMS)
        ]
        alone = toys.llm.generate([f"prompt number {i}" for i in range(STREAMS)], params)
        assert streamed == [(completion.text, completion.finish_reason) for completion in alone]


def test_fifty_clients_that_leave_at_random_leave_nothing():
    chance = random.Random(8)
    with served({"max_queue": LEAVERS}, max_sequences=16, **SMALL) as toys:
        before = ask(toys.url, COMPLETE, {"prompt": "bystander", "seed": 1, "max_tokens": 60}).body["choices"]

        async def run() -> None:
            await asyncio.gather(*(leave(toys.url, i, chance.randrange(20)) for i in range(LEAVERS)))

        asyncio.run(run())
        wait_for(lambda: toys.llm.coordinator.load == (0, 0, 0))
        assert all(lane.told == {} for lane in toys.llm.coordinator.lanes)
        after = ask(toys.url, COMPLETE, {"prompt": "bystander", "seed": 1, "max_tokens": 60}).body["choices"]
        assert after == before
        cancelled = 'vllm:request_success_total{engine="0",finished_reason="cancelled"'
        counted = next(
            line for line in ask(toys.url, "/metrics").body.splitlines() if line.startswith(cancelled)
        )
        assert float(counted.split()[-1]) == LEAVERS


def test_a_client_that_does_not_read_slows_nobody():
    """Its answer is longer than all buffers between it and the lanes; others are answered meanwhile."""
    with served(target="vocabulary=256,context=100000", max_sequences=2) as toys:

        async def run() -> None:
            asked = body(0) | {"max_tokens": 60000, "logprobs": 5}
            async with aclosing(stream(toys.url, COMPLETE, asked)) as unread:
                await anext(unread)
                rounds = toys.llm.coordinator.stats.rounds
                for i in range(5):
                    assert (await read(toys.url, i))[1] == "length"
                assert toys.llm.coordinator.load.running == 1
                assert toys.llm.coordinator.stats.rounds > rounds

        asyncio.run(run())
        wait_for(lambda: toys.llm.coordinator.load == (0, 0, 0))
