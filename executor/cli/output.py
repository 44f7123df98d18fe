"""What a command writes: results to stdout, everything else to stderr."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

log = logging.getLogger("speclane")


def write(text: str) -> None:
    """To stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(result: Mapping[str, Any]) -> None:
    """One object on one line; ASCII only, so that no terminal's encoding can spoil it."""
    write(json.dumps(result) + "\n")


def note(text: str) -> None:
    """One line to stderr."""
    sys.stderr.write(f"speclane: {text}\n")
    sys.stderr.flush()


class _StderrLines(logging.Handler):
    """Log records as lines like those of `note`, to whatever sys.stderr is then: a live view replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        note(level + self.format(record))


def log_to_stderr(*, verbose: bool) -> None:
    """The executor's log goes to stderr: warnings, or with `verbose` everything."""
    log.handlers = [_StderrLines()]
    log.propagate = False
    log.setLevel(logging.INFO if verbose else logging.WARNING)


@contextmanager
def progress_shown() -> Iterator[None]:
    """Show progress lines (fetching, converting) even if not verbose: they explain a wait of minutes."""
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
