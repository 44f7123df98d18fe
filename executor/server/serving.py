"""Runs the server: one event loop, from bound socket to drained connections."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import uvicorn

from executor.errors import InvalidConfig, SpeclaneError
from executor.events import record
from executor.notify import Notifier
from executor.server.app import Api, application
from executor.server.generation import Desk
from executor.server.guard import Guard
from executor.server.herald import Herald
from executor.server.live import Live
from executor.server.metrics import Metrics
from executor.server.page import Page
from executor.server.speculator import SpeculatorSwitch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executor.llm import LLM
    from executor.server.options import ServerOptions
    from executor.server.tracing import Tracing

_WATCH_SECONDS = 0.5
_LAST_BYTES_SECONDS = 2
"""For what was cut off at the end of a drain to be told so."""
_SWITCH_SECONDS = 0.0005
"""The loop computes beside the coordinator's thread, which must not wait long for the interpreter."""


def bind(options: ServerOptions) -> socket.socket:
    """The address, taken but not listening yet: until then clients are refused. Raises InvalidConfig."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, number)
    except OSError as error:
        raise InvalidConfig("host", f"host {options.host}: {error.strerror}; try 127.0.0.1") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InvalidConfig(
            "port", f"port {options.port} of {options.host}: {error.strerror}; try another, or 0 for any"
        ) from None
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server:
    """Serves an executor that has been started, on a socket of `bind`."""

    def __init__(
        self, llm: LLM, options: ServerOptions, bound: socket.socket, listening: Callable[[], None]
    ) -> None:
        """`listening` is called once clients can connect."""
        self._llm = llm
        self._options = options
        self._bound = bound
        self._stopping = False
        self._cut_off = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening = listening
        self._herald = Herald(Notifier(os.environ), llm, url_of(bound))

    def run(self) -> int:
        """Serve until `stop`, SIGTERM or SIGINT, then drain. How many answers were cut off at the end.

        Raises SpeclaneError if the executor failed for good.
        """
        before = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            asyncio.run(self._serve())
        finally:
            sys.setswitchinterval(before)
            self._bound.close()
        return self._cut_off

    def stop(self) -> None:
        """As SIGTERM. May be called from any thread."""
        assert self._loop is not None, "it has been running"
        with suppress(RuntimeError):  # it has ended by itself
            self._loop.call_soon_threadsafe(self._stop)

    # ------------------------------------------------------------ the event loop

    async def _serve(self) -> None:
        options, llm = self._options, self._llm
        self._loop = asyncio.get_running_loop()
        model = options.model_name or llm.config.target
        metrics = Metrics(llm, model)
        guard = Guard(options.api_key, options.max_body)
        tracing = _tracing(options.otlp_endpoint, model)
        record = tracing.record if tracing is not None else None
        self._desk = Desk(llm, options.max_queue, options.request_timeout, metrics, record)
        api = Api(llm, model, guard, self._desk, SpeculatorSwitch(llm), metrics)
        live = Live(llm, model, self._desk.draining)
        routes = [*api.routes(), *Page(live, guard).routes()]
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                application(routes, options.cors_origins),
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=int(options.shutdown_timeout) + 1 + _LAST_BYTES_SECONDS,
            )
        )
        with self._signals():
            watcher = asyncio.create_task(self._watch())
            try:
                await self._uvicorn.serve(sockets=[self._bound])
            finally:
                watcher.cancel()
                live.close()
                if tracing is not None:
                    await asyncio.to_thread(tracing.close)
        health = llm.coordinator.health
        if health.state == "failed":
            raise SpeclaneError(f"the executor failed: {health.reason}")

    async def _watch(self) -> None:
        """Tell that it listens; end the server when its executor has failed for good."""
        while not self._uvicorn.started:
            await asyncio.sleep(0)
        self._listening()
        while self._llm.coordinator.health.state != "failed":
            self._herald.tell(time.monotonic())
            await asyncio.sleep(min(_WATCH_SECONDS, self._herald.period))
        self._stop()

    def _stop(self) -> None:
        """Take no more requests, let those under way end; the second time, at once."""
        if self._stopping:
            self._cut()
            self._uvicorn.force_exit = True
            return
        self._stopping = True
        self._herald.stopping()
        record(logging.INFO, "draining", answers=self._desk.answers)
        self._desk.draining.set()
        self._uvicorn.should_exit = True
        assert self._loop is not None, "it runs"
        self._loop.call_later(self._options.shutdown_timeout, self._cut)

    def _cut(self) -> None:
        self._cut_off = self._desk.answers
        self._desk.cancel_all()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT drain, where there is a main thread to get them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = [signal.getsignal(number) for number in numbers]
        for number in numbers:
            loop.add_signal_handler(number, self._stop)
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                loop.remove_signal_handler(number)
                signal.signal(number, handler)


def _tracing(endpoint: str | None, model: str) -> Tracing | None:
    if endpoint is None:
        return None
    from executor.server.tracing import Tracing  # its packages are an extra

    return Tracing(endpoint, model)


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are ours."""
        yield
