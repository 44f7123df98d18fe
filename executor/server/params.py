"""From the fields of a body to SamplingParams. Every field is passed on, or refused by its name. Pure."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from executor.sampling import SamplingParams
from executor.server.errors import refuse

if TYPE_CHECKING:
    from executor.server.bodies import Sampled

MAX_CHOICES = 128
MAX_STOPS = 16
MAX_STOP_TOKENS = 256

_AS_THEY_ARE = (
    *("temperature", "top_p", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("allowed_token_ids", "bad_words"),
)
_NEUTRAL: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1}
"""What asks for nothing may be sent, whether or not the field is known to the executor."""
_KNOWN = frozenset(field.name for field in fields(SamplingParams))


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
        value = getattr(body, name)
        if value is not None and value != _NEUTRAL.get(name):
            wanted[name] = tuple(value) if isinstance(value, list) else value
    if body.top_k not in (None, -1):  # vLLM's -1 is all
        wanted["top_k"] = body.top_k
    if body.stop is not None:
        wanted["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        if len(wanted["stop"]) > MAX_STOPS:
            refuse("stop", f"stop may have {MAX_STOPS} strings, got {len(wanted['stop'])}; leave some out")
    if body.stop_token_ids is not None:
        wanted["stop_token_ids"] = tuple(body.stop_token_ids)
        if len(body.stop_token_ids) > MAX_STOP_TOKENS:
            refuse("stop_token_ids", f"stop_token_ids may have {MAX_STOP_TOKENS} tokens; leave some out")
    if body.logit_bias:
        wanted["logit_bias"] = _bias(body.logit_bias)
    _refuse_what_is_not_there(body)
    for name in wanted.keys() - _KNOWN:
        refuse(name, f"{name} is not supported by this version; leave it out", code="unsupported_field")
    return SamplingParams(**wanted)


def for_choice(params: SamplingParams, choice: int) -> SamplingParams:
    """The first of n answers is the one that n=1 gives; the others have seeds of their own."""
    if params.seed is None or choice == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{choice}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest) >> 1)


def _bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not key.isdecimal() or not key.isascii() or len(key) > 10:
            refuse("logit_bias", f'logit_bias needs token ids as keys, got {key[:40]!r}; try {{"42": -1}}')
        bias[int(key)] = value
    return bias


def _refuse_what_is_not_there(body: Sampled) -> None:
    if body.prompt_logprobs is not None:
        refuse(
            "prompt_logprobs",
            "prompt_logprobs is not supported by this version; leave it out",
            code="unsupported_field",
        )
    if body.response_format is not None and body.response_format.type != "text":
        refuse(
            "response_format",
            f"response_format {body.response_format.type} is not supported by this version; try text",
            code="unsupported_field",
        )
    if body.structured_outputs is not None:
        refuse(
            "structured_outputs",
            "structured_outputs is not supported by this version; leave it out",
            code="unsupported_field",
        )
