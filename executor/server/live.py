"""What the dashboard sees: a few pictures a second of the executor, and its events, to all who look.

Nothing is computed while nobody looks, except that events are kept.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from executor import events
from executor.request import Acceptance
from executor.server.answer import STREAM_HEADERS, event, hang_up
from executor.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Receive, Scope, Send

    from executor.lane import Lane
    from executor.llm import LLM

TICK_SECONDS = 0.25
MAX_VIEWERS = 32
_WINDOW_TICKS = 40
"""Acceptance is shown of the last ten seconds."""
_RATE_TICKS = 8
_EVENTS_KEPT = 200


class _Mark(NamedTuple):
    """Totals at one tick; what happened is the difference of two."""

    at: float
    tokens: int
    rounds: int
    drafted: list[int]
    accepted: list[int]
    busy_ns: dict[str, int]


class Live:
    def __init__(self, llm: LLM, model: str, draining: asyncio.Event) -> None:
        self._llm = llm
        self._model = model
        self._draining = draining
        self._loop = asyncio.get_running_loop()
        self._marks: deque[_Mark] = deque(maxlen=_WINDOW_TICKS + 1)
        self._numbers = itertools.count(1)
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS_KEPT)
        self._viewers = 0
        events.listeners.append(self._happened)

    def close(self) -> None:
        events.listeners.remove(self._happened)

    def stream(self) -> LiveStream:
        """Raises ApiError, 503, if too many look already."""
        if self._viewers >= MAX_VIEWERS:
            raise ApiError(503, f"{MAX_VIEWERS} pages are open already; close one", code="too_many_viewers")
        return LiveStream(self)

    async def pictures(self) -> AsyncIterator[bytes]:
        """Server-sent events until the server drains: first all events kept, then a picture per tick."""
        self._viewers += 1
        try:
            seen = 0
            while not self._draining.is_set():
                news = [happened for happened in list(self._events) if happened["number"] > seen]
                seen = news[-1]["number"] if news else seen
                yield event(self._picture() | {"events": news})
                await asyncio.sleep(TICK_SECONDS)
        finally:
            self._viewers -= 1

    # ------------------------------------------------------------ inside

    def _happened(self, level: int, name: str, fields: dict[str, str]) -> None:
        """In any thread."""
        number = next(self._numbers)
        self._events.append(
            {"number": number, "at": time.time(), "level": level, "event": name, "fields": fields}
        )

    def _mark(self) -> _Mark:
        """The newest, taken at most once per tick however many look."""
        now = time.monotonic()
        if self._marks and now - self._marks[-1].at < 0.8 * TICK_SECONDS:
            return self._marks[-1]
        if self._marks and now - self._marks[-1].at > 4 * TICK_SECONDS:
            self._marks.clear()  # nobody has looked for a while
        stats = self._llm.coordinator.stats
        # A copy, made in one step of the interpreter: the coordinator's thread goes on counting.
        acceptance = Acceptance(dict(stats.acceptance.outcomes))
        busy = {lane.epoch: lane.busy_ns for lane in self._llm.coordinator.lanes}
        mark = _Mark(now, acceptance.tokens, stats.rounds, acceptance.drafted, acceptance.accepted, busy)
        self._marks.append(mark)
        return mark

    def _picture(self) -> dict[str, Any]:
        now = self._mark()
        coordinator, config = self._llm.coordinator, self._llm.config
        before = self._marks[max(0, len(self._marks) - 1 - _RATE_TICKS)]
        first, last = self._marks[0], self._marks[max(0, len(self._marks) - 2)]
        seconds = now.at - before.at
        load, health, memory = coordinator.load, coordinator.health, coordinator.memory
        drafted, accepted = _since(first.drafted, now.drafted), _since(first.accepted, now.accepted)
        verdicts = now.tokens - sum(now.accepted) - first.tokens + sum(first.accepted)
        return {
            "at": time.time(),
            "model": self._model,
            "speculator": self._llm.speculation,
            "k": coordinator.controller.current.k,
            "setting": str(coordinator.controller.current),
            "setting_reason": coordinator.controller.reason,
            "health": {"state": health.state, "reason": health.reason, "since": health.since},
            "lanes": [self._lane(lane, now, last) for lane in coordinator.lanes],
            "load": {"running": load.running, "waiting": load.waiting, "seats": config.max_sequences},
            "tokens_per_second": (now.tokens - before.tokens) / seconds if seconds > 0 else 0.0,
            "rounds_per_second": (now.rounds - before.rounds) / seconds if seconds > 0 else 0.0,
            "acceptance": {
                "drafted": drafted,
                "accepted": accepted,
                "length": (now.tokens - first.tokens) / verdicts if verdicts else 0.0,
            },
            "kv": min(1.0, load.tokens / memory.tokens) if memory is not None else 0.0,
            "memory": self._memory(),
        }

    def _lane(self, lane: Lane, now: _Mark, last: _Mark) -> dict[str, Any]:
        process = lane.process  # once: the coordinator's thread may set it to None at any time
        computed = now.busy_ns.get(lane.epoch, 0) - last.busy_ns.get(lane.epoch, 0)
        elapsed = (now.at - last.at) * 1e9
        return {
            "lane": lane.name,
            "state": str(lane.state),
            "phase": lane.phase,
            "pid": process.pid if process is not None else None,
            "engine": lane.spec.engine,
            "busy": min(1.0, computed / elapsed) if elapsed > 0 else 0.0,
            "restarts": self._llm.coordinator.restarts.get(lane.name, 0),
            "deaths": self._llm.coordinator.deaths.get(lane.name, 0),
        }

    def _memory(self) -> list[dict[str, Any]]:
        plan = self._llm.coordinator.memory
        lanes = plan.lanes if plan is not None else ()
        return [
            {
                "lane": lane.name,
                "kv_tokens": lane.kv_tokens,
                "parts": {
                    "process": lane.profile.process,
                    "weights": lane.profile.weights,
                    "scratch": lane.profile.activations + lane.profile.workspace,
                    "graphs": lane.profile.graphs,
                    "kv": lane.kv,
                },
            }
            for lane in lanes
        ]


class LiveStream:
    """An ASGI response."""

    def __init__(self, live: Live) -> None:
        self._live = live

    async def __call__(self, _scope: Scope, receive: Receive, send: Send) -> None:
        sender = asyncio.create_task(self._send(send))

        def leave() -> None:
            sender.cancel()

        watcher = asyncio.create_task(hang_up(receive, leave))
        try:
            await asyncio.wait([sender])
        finally:
            watcher.cancel()
            sender.cancel()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async for picture in self._live.pictures():
            await send({"type": "http.response.body", "body": picture, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


def _since(before: list[int], now: list[int]) -> list[int]:
    return [count - (before[i] if i < len(before) else 0) for i, count in enumerate(now)]
