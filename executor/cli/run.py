"""Runs one command and turns whatever happens into an exit status and at most one line of error."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any

import typer

from executor.cli.app import app
from executor.cli.complaint import complaint
from executor.cli.output import note

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(argv: Sequence[str]) -> int:
    """The exit status. Raises quitting.Quit when told to leave early."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")  # a model's text must not fail on a terminal's encoding
    command = typer.main.get_command(app)
    try:
        status = command.main(list(argv), prog_name="speclane", standalone_mode=False)
        sys.stdout.flush()
    except Exception as error:  # noqa: BLE001  the process's edge: the user gets a line, never a traceback
        told = complaint(error, _named(command, argv))
        note(f"error: {told.line}")
        if told.details:
            sys.stderr.write("".join(f"  {line}\n" for line in told.details.splitlines()))
        if "--verbose" in argv and told.status == 1:
            traceback.print_exception(error)
        return told.status
    return status if isinstance(status, int) else 0


def _named(command: Any, argv: Sequence[str]) -> str:
    """`speclane bench decode`: not all of click's errors know where they happened."""
    names = ["speclane"]
    for word in argv:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        names.append(word)
    return " ".join(names)
