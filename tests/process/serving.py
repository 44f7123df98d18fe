"""A real HTTP server over toys, and a small client that shows exactly what crosses."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from executor import LLM
from executor.server.options import ServerOptions
from executor.server.serving import Server, bind, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

SECONDS = 60.0
DRAFT = "vocabulary=256,agree=0.8"
SLOW = "vocabulary=256,step_ms=20"


class Served(NamedTuple):
    url: str
    llm: LLM
    server: Server


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: Any

    @property
    def error(self) -> dict[str, Any]:
        """The error object, which must have all its fields and no others."""
        error: dict[str, Any] = self.body["error"]
        assert set(self.body) == {"error"}
        assert set(error) == {"message", "type", "param", "code"}
        return error


@contextmanager
def served(options: dict[str, Any] | None = None, **config: Any) -> Iterator[Served]:
    """`options`: of the server; `config`: of the executor."""
    config = {"engine": "toy", "speculator": DRAFT, "threads": 1} | config
    with LLM(**config) as llm:
        made = ServerOptions(**({"port": 0, "shutdown_timeout": 5.0} | (options or {})))
        bound = bind(made)
        listening = threading.Event()
        server = Server(llm, made, bound, listening.set)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            assert listening.wait(SECONDS)
            yield Served(url_of(bound), llm, server)
        finally:
            server.stop()
            thread.join(SECONDS)
        assert not thread.is_alive()


def ask(
    url: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
) -> Answer:
    """One request on a connection of its own; `body` as it is if it is bytes, else as JSON."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=SECONDS)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body)
        kind = {} if data is None else {"Content-Type": "application/json"}
        verb = method or ("GET" if data is None else "POST")
        connection.request(verb, path, data, kind | dict(headers or {}))
        reply = connection.getresponse()
        raw = reply.read()
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return Answer(reply.status, reply.headers, json.loads(raw) if is_json else raw.decode())
    finally:
        connection.close()


def events(stream: str) -> list[Any]:
    """What a stream said, each event parsed; it must end with [DONE]."""
    assert stream.endswith("data: [DONE]\n\n")
    frames = stream.split("\n\n")[:-2]
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame[6:]) for frame in frames]


def asked(url: str, path: str, body: Any) -> http.client.HTTPConnection:
    """A connection on which this was asked; closing it hangs up."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=SECONDS)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    return connection


def wait_for(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


async def stream(url: str, path: str, body: Any) -> AsyncIterator[bytes]:
    """The events of a stream as they come, without their framing; chunks of HTTP are undone by hand."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    try:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        status = await reader.readuntil(b"\r\n\r\n")
        assert status.startswith(b"HTTP/1.1 200 "), status
        buffered = b""
        while size := int(await reader.readline(), 16):
            buffered += (await reader.readexactly(size + 2))[:-2]
            *whole, buffered = buffered.split(b"\n\n")
            for event in whole:
                yield event.removeprefix(b"data: ")
    finally:
        writer.close()
        await writer.wait_closed()
