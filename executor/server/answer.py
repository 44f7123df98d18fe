"""A generation on its way to its client, at once or as it comes. A client that goes away cancels it.

A slow client holds up nobody: what it has not taken yet is kept, and sent in one piece when it reads again.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from executor.request import Delta
from executor.server.errors import ApiError
from executor.server.shape import acceptance_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

    from executor.server.bodies import StreamOptions
    from executor.server.generation import Generation
    from executor.server.shape import Shape

_json = msgspec.json.Encoder()
_JSON_HEADERS = [(b"content-type", b"application/json")]
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _json.encode(data) + b"\n\n"


class Whole:
    """An ASGI response: all of it in one object."""

    def __init__(self, generation: Generation, shape: Shape) -> None:
        self._generation = generation
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(hang_up(receive, self._generation.cancel))
        try:
            body = _json.encode(self._shape.whole(await self._generation.finished()))
        finally:
            watcher.cancel()
            self._generation.cancel()
        length = (b"content-length", str(len(body)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [*_JSON_HEADERS, length]})
        await send({"type": "http.response.body", "body": body})


class Streamed:
    """An ASGI response: server-sent events. What fails before the first of them has a status of its own."""

    def __init__(self, generation: Generation, shape: Shape, options: StreamOptions | None) -> None:
        self._generation = generation
        self._shape = shape
        self._usage = bool(options and options.include_usage)
        self._acceptance = bool(options and options.include_acceptance)
        self._opened: set[int] = set()
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watcher = asyncio.create_task(hang_up(receive, self._generation.cancel))
        try:
            async for outputs in self._generation.outputs():
                # What came at once goes out at once.
                chunks = [chunk for choice, output in outputs for chunk in self._chunks(choice, output)]
                if chunks:
                    await self._say(send, b"".join(map(event, chunks)))
            completions = [self._generation.completions[i] for i in range(len(self._generation.jobs))]
            usage = event(self._shape.usage(completions)) if self._usage else b""
            await self._say(send, usage + b"data: [DONE]\n\n")
        except ApiError as error:
            if not self._started:
                raise
            await self._say(send, event(error.body))
        finally:
            watcher.cancel()
            self._generation.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _say(self, send: Send, data: bytes) -> None:
        if not self._started:
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        await send({"type": "http.response.body", "body": data, "more_body": True})

    def _chunks(self, choice: int, output: Any) -> list[dict[str, Any]]:
        chunks = []
        if isinstance(output, Delta):
            if choice not in self._opened:
                self._opened.add(choice)
                chunks.append(self._shape.opening(choice, output))
            chunk = self._shape.delta(choice, output)
            if chunk is not None and self._acceptance:
                chunk["acceptance"] = acceptance_of(output)
            chunks.append(chunk)
        else:
            chunks.append(self._shape.closing(choice, output))
        said = [chunk for chunk in chunks if chunk is not None]
        if self._usage:  # OpenAI's chunks then all have the field, null but in the last
            for chunk in said:
                chunk["usage"] = None
        return said


async def hang_up(receive: Receive, cancel: Callable[[], None]) -> None:
    """Once the body has been read, all that can come is that the client is gone."""
    with suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()
