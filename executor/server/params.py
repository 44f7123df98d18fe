"""From the fields of a body to SamplingParams. Every field is passed on, or refused by its name. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from executor.errors import InvalidRequest
from executor.grammar import Grammar
from executor.sampling import SamplingParams
from executor.server.errors import refuse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from executor.grammar import Kind
    from executor.server.bodies import Sampled

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_TOKENS = 256

MAX_BAD_WORDS = 256
MAX_BIASES = 1024

_AS_THEY_ARE = (
    *("temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos", "prompt_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def choices(body: Sampled) -> int:
    """How many answers are wanted to each prompt. Raises ApiError."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MAX_CHOICES:
        refuse("n", f"n must be from 1 to {MAX_CHOICES}, got {n}; try 1")
    return n


def sampling_params(body: Sampled, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """`max_tokens` and `logprobs` as the endpoint understands them. Raises ApiError, InvalidRequest."""
    wanted: dict[str, Any] = {"max_tokens": max_tokens, "logprobs": logprobs}
    for name in _AS_THEY_ARE:
        if (value := getattr(body, name)) is not None:
            wanted[name] = value
    if body.top_k not in (None, -1):  # vLLM's -1 is all
        wanted["top_k"] = body.top_k
    stops = (body.stop,) if isinstance(body.stop, str) else body.stop
    wanted["stop"] = _several("stop", stops, MAX_STOPS)
    wanted["stop_token_ids"] = _several("stop_token_ids", body.stop_token_ids, MAX_STOP_TOKENS)
    wanted["bad_words"] = _several("bad_words", body.bad_words, MAX_BAD_WORDS)
    if body.allowed_token_ids is not None:
        wanted["allowed_token_ids"] = tuple(body.allowed_token_ids)
    if body.logit_bias is not None:
        wanted["logit_bias"] = _bias(body.logit_bias)
    if body.prompt_logprobs is not None and body.stream:
        refuse("prompt_logprobs", "prompt_logprobs is not for streams; leave out one of them")
    return SamplingParams(**wanted, grammar=form(body))


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The first of n answers is the one that n=1 gives; the others have seeds of their own."""
    if params.seed is None or choice == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{choice}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest) >> 1)


def form(body: Sampled) -> Grammar | None:
    """What form the answer must have. Raises ApiError naming the field that says so."""
    given, asked = body.response_format, body.structured_outputs
    if given is not None and given.type != "text":
        if asked is not None:
            refuse("structured_outputs", "structured_outputs contradicts response_format; leave one out")
        if given.type == "json_object":
            return _grammar("response_format", "json_object", "")
        if given.json_schema is None:
            refuse("response_format.json_schema", "response_format.json_schema is missing")
        return _grammar("response_format.json_schema", "json_schema", given.json_schema.schema)
    if asked is None:
        return None
    ways: dict[Kind, Any] = {
        "json_schema": asked.json,
        "regex": asked.regex,
        "choice": asked.choice,
        "grammar": asked.grammar,
        "json_object": "" if asked.json_object else None,
    }
    chosen = {kind: value for kind, value in ways.items() if value is not None}
    if len(chosen) != 1:
        refuse("structured_outputs", "structured_outputs needs one of json, regex, choice, grammar")
    ((kind, value),) = chosen.items()
    return _grammar("structured_outputs", kind, value)


def _grammar(field: str, kind: Kind, value: Any) -> Grammar:
    try:
        return Grammar(kind, value)
    except InvalidRequest as error:
        refuse(field, f"{field}: {error}")


def _several(name: str, values: Iterable[Any] | None, most: int) -> tuple[Any, ...]:
    several = tuple(values or ())
    if len(several) > most:
        refuse(name, f"{name} may have {most} entries, got {len(several)}; leave some out")
    return several


def _bias(given: dict[str, float]) -> dict[int, float]:
    if len(given) > MAX_BIASES:
        refuse("logit_bias", f"logit_bias may have {MAX_BIASES} entries, got {len(given)}; leave some out")
    bias = {}
    for key, value in given.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 10:
            refuse("logit_bias", f'logit_bias needs token ids as keys, got {key[:40]!r}; try {{"42": -1}}')
        bias[int(key)] = value
    return bias
