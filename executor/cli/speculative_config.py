"""`--speculative-config`: vLLM's JSON, read as our own options. Pure.

What asks for something that there is not is refused by its key; what only says what we do anyway is taken.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from executor.errors import InvalidConfig

_OPTION = "speculative_config"
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 5}'
_OWN = ("ngram", "suffix", "eagle", "cascade")
_MODEL_METHODS = ("draft_model",)
_SAME_ANYWAY = {
    "draft_tensor_parallel_size": 1,
    "disable_padded_drafter_batch": None,
    "enforce_eager": None,
    "quantization": None,
    "revision": None,
    "max_model_len": None,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
}
"""Keys that may be given with this value, or null: that is how it is here."""


def speculative_config(text: str) -> dict[str, Any]:
    """`speculator` and `num_speculative_tokens`, as far as they are given. Raises InvalidConfig."""
    try:
        given = json.loads(text)
    except ValueError as error:
        _refuse(f"is no JSON: {error}")
    if not isinstance(given, dict):
        _refuse(f"must be an object, got {text[:40]!r}")
    chosen: dict[str, Any] = {}
    method, model = given.pop("method", None), given.pop("model", None)
    own = str(method or model).strip("[]")  # vLLM spells the model of a lookup [ngram]
    if own == "eagle" and isinstance(model, str) and model != own:
        chosen["speculator"] = model  # a head's file
    elif own in _OWN:
        chosen["speculator"] = own
    elif method in (None, *_MODEL_METHODS) and isinstance(model, str):
        chosen["speculator"] = model
    elif method in _MODEL_METHODS:
        _refuse(f"method {method} needs a model")
    elif method is not None:
        known = ", ".join((*_OWN, *_MODEL_METHODS))
        _refuse(f"method {method!r} is not one of {known}")
    else:
        _refuse("has neither method nor model")
    if (k := given.pop("num_speculative_tokens", None)) is not None:
        chosen["num_speculative_tokens"] = k
    for key, value in given.items():
        if key not in _SAME_ANYWAY:
            _refuse(f"has a key {key!r} that there is not here")
        if value is not None and value != _SAME_ANYWAY[key]:
            _refuse(f"{key} {value!r} cannot be chosen here; leave it out")
    return chosen


def _refuse(what: str) -> NoReturn:
    raise InvalidConfig(_OPTION, f"speculative-config {what}; try {_EXAMPLE}")
