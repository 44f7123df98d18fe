"""What happens to lanes as log lines that a program can read: `event=lane_died lane=speculator …`.

Owns the form of these lines; what happened, and how bad that is, is the caller's to say.
"""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger("speclane")
listeners: list[Callable[[int, str, dict[str, str]], None]] = []
"""Hear of every event, at any level: its level, name, fields. Called where it happens, in any thread."""

_PLAIN = re.compile(r"[\w.:,/@+-]+")


def record(level: int, event: str, **fields: object) -> None:
    """One line at `level` (as in logging). Fields that are None are left out."""
    log.log(level, "%s", line(event, **fields))
    for listener in list(listeners):
        listener(level, event, {key: str(value) for key, value in fields.items() if value is not None})


def line(event: str, **fields: object) -> str:
    """`key=value` pairs; what is not one plain word is a JSON string, so there is never a second line."""
    pairs = {"event": event} | {key: value for key, value in fields.items() if value is not None}
    return " ".join(f"{key}={_text(value)}" for key, value in pairs.items())


def _text(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)
