"""What clients may send: one struct per endpoint, with every field that is known. Others are refused by name.

A field whose value is null counts as absent. What a value may be, beyond its type, is said elsewhere.
"""

from __future__ import annotations

import re
from typing import Any, Literal, TypeVar

import msgspec

from executor.server.errors import ApiError


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Base of all bodies."""


class StreamOptions(Body, kw_only=True):
    """include_acceptance: ours; each chunk says how much of it had been drafted."""

    include_usage: bool | None = None
    include_acceptance: bool | None = None


class JsonSchema(Body, kw_only=True):
    name: str = ""
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body, kw_only=True):
    """As in vLLM: exactly one of them."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class Sampled(Body, kw_only=True):
    """What chats and completions have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Only a label, for the log."""


class ChatBody(Sampled, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None


class CompletionBody(Sampled, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: bool | None = None


class TokenizeBody(Body, kw_only=True):
    """A prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: list[int]


class SpeculatorBody(Body, kw_only=True):
    """Another model, or the present one off or on again: exactly one of them."""

    model: str | None = None
    enabled: bool | None = None


_Kind = TypeVar("_Kind", bound=Body)

_UNKNOWN = re.compile(
    r"^Object contains unknown field `(?P<field>.*?)`(?: - at `\$\.(?P<parent>.*)`)?$", re.S
)
_MISSING = re.compile(
    r"^Object missing required field `(?P<field>.*?)`(?: - at `\$\.(?P<parent>.*)`)?$", re.S
)
_WRONG = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<field>.*)`)?$", re.S)


def decode(data: bytes, kind: type[_Kind]) -> _Kind:
    """A body as its struct. Raises ApiError, 400, naming the field."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is no JSON: {error}", code="invalid_json") from None


def _invalid(message: str) -> ApiError:
    for pattern, says, code in (
        (_UNKNOWN, "is not known here; leave it out", "unknown_field"),
        (_MISSING, "is missing", "missing_field"),
    ):
        if found := pattern.match(message):
            field = ".".join(filter(None, (found["parent"], found["field"])))
            return ApiError(400, f"{field} {says}", param=field, code=code)
    wrong = _WRONG.match(message)
    if wrong is None or not wrong["field"]:
        return ApiError(400, f"the body: {message}", code="invalid_type")
    where = wrong["field"]
    return ApiError(400, f"{where}: {wrong['what']}", param=where, code="invalid_type")
