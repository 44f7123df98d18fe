"""The command lines of a topology's processes, and the Config that `speclane serve` makes of one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from executor.config import Config

SPECLANE = (sys.executable, "-P", "-m", "executor")


def arguments(path: str, options: Mapping[str, Any]) -> list[str]:
    """Options as a topology gives them, on a command line. Raises InvalidConfig about `path`."""
    words: list[str] = []
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        for each in value if isinstance(value, list) else [value]:
            if each is True:
                words.append(option)
            elif isinstance(each, str | int | float) and each is not False:
                words.append(f"{option}={each}")
            elif each is not False:
                raise InvalidConfig(
                    "topology",
                    f"{path}.{name}: {type(each).__name__} is no option's value; try text, number or list",
                )
    return words


def config_of(path: str, command: str, words: Sequence[str]) -> tuple[Config, dict[str, Any]]:
    """What `speclane COMMAND WORDS` would run, and all its options by name, without running it.

    Raises InvalidConfig about `path`, in the words in which the command itself would refuse them.
    """
    import typer

    from executor.cli import options
    from executor.cli.app import app
    from executor.cli.complaint import complaint

    try:
        found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
        given = found.make_context(command, list(words)).params
        return options.config(given), given
    except Exception as error:
        told = complaint(error, f"speclane {command}")
        if told.status != 2:
            raise
        raise InvalidConfig("topology", f"{path}: {told.line}") from None
