"""An error as the command line says it: one line that names the option and a value that works, and a status."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import typer

from executor.errors import InvalidConfig, InvalidRequest, LaneFailed, SpeclaneError
from ipc.errors import WireError

UsageError = typer.BadParameter.__mro__[1]
"""Click's base of all usage errors. Typer carries its own copy of click, or not, depending on its version."""

_OPTIONS = {
    name: "--" + name.replace("_", "-")
    for name in [
        "target",
        "speculator",
        "engine",
        "dtype",
        "device",
        "num_speculative_tokens",
        "max_model_len",
        "threads",
        "cache_dir",
        "load_timeout",
        "draft_timeout",
        "verify_timeout",
        "prompt",
        "system",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "stop",
        "ignore_eos",
        "logprobs",
        "layers",
        "batch",
        "prompts",
        "limit",
        "new_tokens",
        "modes",
        "repeat",
        "rounds",
    ]
} | {
    "stop_token_ids": "--stop-token-id",
    "max_sequences": "--batch",
    "source": "SOURCE",
    "destination": "DESTINATION",
}
_EXAMPLES = {"seed": 42, "threads": 2, "max_model_len": 2048, "num_speculative_tokens": 5, "logprobs": 5}
_EXAMPLES |= {"load_timeout": 600, "draft_timeout": 10, "verify_timeout": 120, "stop_token_id": 2}


class Complaint(NamedTuple):
    """`line` without the program's name; `details` may have several lines."""

    line: str
    status: int
    details: str = ""


def complaint(error: Exception) -> Complaint:
    """What to tell the user of any error."""
    if isinstance(error, UsageError):
        return Complaint(_usage(error), 2)
    if isinstance(error, InvalidConfig | InvalidRequest):
        return Complaint(_named(error.field, str(error)), 2)
    if isinstance(error, LaneFailed):
        return Complaint(str(error), 1, error.stderr_tail)
    if isinstance(error, SpeclaneError | WireError):
        return Complaint(_one_line(str(error)), 1)
    return Complaint(f"internal error: {type(error).__name__}: {_one_line(str(error))}", 1)


def _named(field: str, message: str) -> str:
    """The message with options in place of the fields of the Python interface."""
    message = _one_line(message)
    for name, option in _OPTIONS.items():
        plain = name == field and rf"^{name}\b|\b{name.replace('_', '-')} must\b"
        pattern = plain or (rf"\b{name}\b" if "_" in name else None)
        if pattern is not None:
            message = re.sub(
                rf"(?<![\w-])(?:{pattern})",
                lambda match, option=option: option + (" must" if match[0].endswith(" must") else ""),
                message,
            )
    option = _OPTIONS.get(field)
    return message if option is None or option in message else f"{option}: {message}"


def _usage(error: Any) -> str:
    text = _one_line(error.format_message()).rstrip(".")
    name = getattr(getattr(error, "param", None), "name", None)
    default = getattr(getattr(error, "param", None), "default", None)
    works = _EXAMPLES.get(name or "", default)
    if isinstance(error, typer.BadParameter) and name is not None and isinstance(works, int | float | str):
        return f"{text}; try {error.param.opts[0]} {works}"
    path = error.ctx.command_path if error.ctx is not None else "speclane"
    return f"{text}; see {path} --help"


def _one_line(text: str) -> str:
    return " ".join(text.split())
