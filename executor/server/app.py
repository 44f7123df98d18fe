"""The routes: each reads its body, has it done elsewhere, and answers."""

from __future__ import annotations

import asyncio
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

from executor.errors import InvalidRequest, SpeclaneError
from executor.server import chat, completions, errors
from executor.server.answer import Streamed, Whole
from executor.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SpeculatorBody,
    TokenizeBody,
    decode,
)
from executor.server.errors import ApiError, refuse
from executor.server.metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request

    from executor.llm import LLM
    from executor.server.bodies import Sampled
    from executor.server.generation import Desk, Job
    from executor.server.guard import Guard
    from executor.server.metrics import Metrics
    from executor.server.shape import Shape
    from executor.server.speculator import SpeculatorSwitch

_INLINE_BODY = 16 << 10
"""Bytes; what takes longer to encode is encoded in a thread, so that no stream waits for it."""
_READY = ("healthy", "degraded")


class Api:
    """The endpoints of one executor."""

    def __init__(
        self,
        llm: LLM,
        model: str,
        guard: Guard,
        desk: Desk,
        switch: SpeculatorSwitch,
        metrics: Metrics,
    ) -> None:
        """`model`: what clients call it."""
        self._llm = llm
        self._desk = desk
        self._switch = switch
        self._metrics = metrics
        self._guard = guard
        self._model = model
        self._created = int(llm.coordinator.health.since)

    def routes(self) -> list[Route]:
        return [
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/models", self.models),
            Route("/v1/models/{model:path}", self.model),
            Route("/v1/speculator", self.speculator),
            Route("/v1/speculator", self.change_speculator, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
        ]

    # ------------------------------------------------------------ generation

    async def chat(self, request: Request) -> Any:
        data = await self._body(request)
        body = decode(data, ChatBody)
        self._check_model(body.model)
        jobs = await self._jobs(data, body, chat.jobs)
        return self._answer(request, body, jobs, chat.ChatShape(body, self._llm.text, self._model))

    async def complete(self, request: Request) -> Any:
        data = await self._body(request)
        body = decode(data, CompletionBody)
        self._check_model(body.model)
        jobs = await self._jobs(data, body, completions.jobs)
        shape = completions.CompletionShape(body, self._llm.text, self._model, jobs)
        return self._answer(request, body, jobs, shape)

    async def _jobs(self, data: bytes, body: Any, make: Callable[[LLM, Any], list[Job]]) -> list[Job]:
        """A grammar may take as long to understand as a long text to encode."""
        formed = body.response_format is not None or body.structured_outputs is not None
        try:
            jobs: list[Job] = await _thinking(len(data), make, self._llm, body, always=formed)
            return jobs
        except InvalidRequest as error:
            if error.field != "grammar":
                raise
            field = "structured_outputs" if body.structured_outputs is not None else "response_format"
            reason = str(error).removeprefix("grammar: ")
            raise InvalidRequest(field, f"{field}: {reason}") from None

    def _answer(self, request: Request, body: Sampled, jobs: Sequence[Job], shape: Shape) -> Whole | Streamed:
        if body.stream_options is not None and not body.stream:
            refuse("stream_options", "stream_options is for streams; add stream: true")
        generation = self._desk.begin(jobs, shape.id, body.user, request.headers)
        return Streamed(generation, shape, body.stream_options) if body.stream else Whole(generation, shape)

    # ------------------------------------------------------------ models and tokens

    async def models(self, request: Request) -> Response:
        self._guard.check_key(request)
        return _json({"object": "list", "data": [self._model_card()]})

    async def model(self, request: Request) -> Response:
        self._guard.check_key(request)
        self._check_model(request.path_params["model"])
        return _json(self._model_card())

    async def tokenize(self, request: Request) -> Response:
        data = await self._body(request)
        body = decode(data, TokenizeBody)
        self._check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            refuse("prompt", "send either prompt or messages")
        tokens = await _thinking(len(data), self._tokens, body)
        answer: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self._llm.max_model_len,
            "tokens": tokens,
        }
        if body.return_token_strs:
            text = self._llm.text
            answer["token_strs"] = [text.token_bytes(token).decode(errors="replace") for token in tokens]
        return _json(answer)

    def _tokens(self, body: TokenizeBody) -> list[int]:
        if body.prompt is not None:
            return self._llm.text.encode(body.prompt)
        return self._llm.text.encode_chat([chat.message(i, m) for i, m in enumerate(body.messages or [])])

    async def detokenize(self, request: Request) -> Response:
        data = await self._body(request)
        body = decode(data, DetokenizeBody)
        self._check_model(body.model)
        size = self._llm.text.vocabulary_size
        for i, token in enumerate(body.tokens):
            if not 0 <= token < size:
                refuse(f"tokens[{i}]", f"tokens[{i}]: {token} is not in the vocabulary, 0 to {size - 1}")
        return _json({"prompt": await _thinking(len(data), self._llm.text.decode, body.tokens)})

    # ------------------------------------------------------------ the executor itself

    async def health(self, _request: Request) -> Response:
        """Liveness: whether it is of any use to go on waiting for this process."""
        health = self._llm.coordinator.health
        return _json({"status": health.state}, 503 if health.state == "failed" else 200)

    async def ready(self, _request: Request) -> Response:
        """Readiness: whether a request would be answered now."""
        health = self._llm.coordinator.health
        state = "draining" if self._desk.draining.is_set() else health.state
        ready = state in _READY
        return _json({"status": state, "ready": ready, "reason": health.reason}, 200 if ready else 503)

    async def metrics(self, _request: Request) -> Response:
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE})

    async def version(self, _request: Request) -> Response:
        return _json({"version": version("speclane")})

    async def speculator(self, request: Request) -> Response:
        self._guard.check_key(request)
        return _json(self._switch.state())

    async def change_speculator(self, request: Request) -> Response:
        self._guard.check_operator(request)
        body = decode(await self._guard.body(request), SpeculatorBody)
        return _json(await self._switch.change(body))

    # ------------------------------------------------------------ inside

    async def _body(self, request: Request) -> bytes:
        self._guard.check_key(request)
        return await self._guard.body(request)

    def _check_model(self, model: str | None) -> None:
        if model not in (None, self._model):
            raise ApiError(
                404, f"there is no model {model!r}; try {self._model}", param="model", code="model_not_found"
            )

    def _model_card(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "speclane",
            "root": self._llm.config.target,
            "max_model_len": self._llm.max_model_len,
        }


def application(routes: Sequence[Route], cors_origins: Sequence[str]) -> Starlette:
    """`cors_origins`: whose pages may call this from a browser."""
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(cors_origins),
        allow_methods=["GET", "POST"],
        allow_headers=["authorization", "content-type"],
    )
    return Starlette(
        routes=routes,
        middleware=[cors] if cors_origins else [],
        exception_handlers={
            ApiError: errors.on_api_error,
            SpeclaneError: errors.on_executor_error,
            HTTPException: errors.on_http_error,
            Exception: errors.on_defect,
        },
    )


async def _thinking(nbytes: int, work: Any, *arguments: Any, always: bool = False) -> Any:
    """Run what takes the longer the more there is to read; in a thread if that is much, or `always`."""
    if nbytes <= _INLINE_BODY and not always:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")
