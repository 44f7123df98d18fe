"""An error as the command line says it: one line that names the option and a value that works, and a status.

Owns how fields of the Python interface are called on the command line.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import typer

from executor.errors import InvalidConfig, InvalidRequest, LaneFailed, SpeclaneError
from ipc.errors import WireError

UsageError = typer.BadParameter.__mro__[1]
"""Click's base of all usage errors. Typer carries its own copy of click, or not, depending on its version."""

_NOT_DASHED = {
    "source": "SOURCE",
    "destination": "DESTINATION",
    "model": "MODEL",
    "topology": "TOPOLOGY",
    "address": "ADDRESS",
    "stop_token_ids": "--stop-token-id",
    "bad_words": "--bad-word",
    "grammar": "--json-schema, --regex or --choice",
}
_EXAMPLES = {
    "seed": 42,
    "threads": 2,
    "max_model_len": 2048,
    "memory_budget": "4GB",
    "kv_tokens": 8192,
    "max_verify_tokens": 64,
    "num_speculative_tokens": 5,
    "logprobs": 5,
    "prompt_logprobs": 5,
    "top_p": 0.95,
    "top_k": 50,
    "min_p": 0.05,
    "min_tokens": 1,
    "stop_token_id": 2,
    "load_timeout": 600,
    "draft_timeout": 10,
    "verify_timeout": 120,
    "hang_timeout": 30,
    "stop_timeout": 3,
    "limit": 8,
}
"""Values that work for options whose default is none of their type."""


class Complaint(NamedTuple):
    """`line` without the program's name; `details` may have several lines."""

    line: str
    status: int
    details: str = ""


def complaint(error: Exception, command: str = "speclane") -> Complaint:
    """What to tell the user of any error; `command`: that and its subcommand, as far as it was given."""
    if isinstance(error, UsageError):
        return Complaint(_usage(error, command), 2)
    if isinstance(error, InvalidConfig | InvalidRequest):
        return Complaint(_named(error.field, _one_line(error)), 2)
    if isinstance(error, LaneFailed):
        return Complaint(_one_line(error), 1, _news(error))
    if isinstance(error, SpeclaneError | WireError):
        return Complaint(_one_line(error), 1)
    return Complaint(f"internal error: {type(error).__name__}: {_one_line(error)}", 1)


def _news(failure: LaneFailed) -> str:
    """What the worker wrote last, unless it is the traceback of the very error that it reported."""
    tail = failure.stderr_tail
    reported = "Traceback" in tail and _one_line(tail).endswith(_one_line(failure.reason))
    return "" if reported else tail


def option(field: str) -> str:
    """`num_speculative_tokens` is `--num-speculative-tokens`."""
    return _NOT_DASHED.get(field) or "--" + field.replace("_", "-")


def _named(field: str, message: str) -> str:
    """The message with the option in place of the field, and in place of other fields it speaks of."""
    if not field.islower():
        return message  # an environment variable
    named = option(field)
    words = rf"{field}|{field.replace('_', '-')}"
    message = re.sub(rf"^(?:{words})\b", named, message)
    if not named.startswith("--"):  # an argument: it is given as it is
        message = message.replace(f"--{field} DIRECTORY", "a DIRECTORY")
    message = re.sub(
        r"(?<![\w-])(?:(?:max|min|num|top|kv)_\w+|\w+_timeout)\b", lambda match: option(match[0]), message
    )
    return message if named in message else f"{named}: {message}"


def _usage(error: Any, command: str) -> str:
    text = _one_line(error.format_message()).rstrip(".")
    parameter = getattr(error, "param", None)
    if isinstance(error, typer.BadParameter) and parameter is not None:
        works = _EXAMPLES.get(parameter.name, parameter.default)
        if isinstance(works, int | float | str):
            return f"{text}; try {parameter.opts[0]} {works}"
    return f"{text}; see {command} --help"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
