"""The command lines of a topology's processes, and the Config that a command makes of one."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from _typeshed import DataclassInstance

    from executor.config import Config

    Group = TypeVar("Group", bound=DataclassInstance)

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


def config_of(path: str, words: Sequence[str]) -> Config:
    """What `speclane serve WORDS` would run, without running it.

    Raises InvalidConfig about `path`, in the words in which the command itself would refuse them.
    """
    from executor.cli.groups import ModelOptions, RecoveryOptions

    with _refusals(path, "serve"):
        given = parsed("serve", words)
        model, recovery = _group(ModelOptions, given), _group(RecoveryOptions, given)
        return model.config(recovery=recovery.recovery(), max_sequences=given["max_sequences"])


def server_config_of(path: str, words: Sequence[str]) -> Config:
    """What `speclane speculator WORDS` would run, its sequences those of all clients together. Raises as
    `config_of`."""
    from executor.cli.groups import RecoveryOptions
    from executor.cli.speculator import SpeculatorOptions
    from executor.pool.opening import checked_address

    with _refusals(path, "speculator"):
        given = parsed("speculator", words)
        model, recovery = _group(SpeculatorOptions, given), _group(RecoveryOptions, given)
        config = model.config(recovery=recovery.recovery(), max_sequences=given["max_sequences"])
        checked_address(config, given["bind"], given["clients"])
        return replace(config, max_sequences=config.max_sequences * given["clients"])


@contextmanager
def _refusals(path: str, command: str) -> Iterator[None]:
    from executor.cli.complaint import complaint

    try:
        yield
    except Exception as error:
        told = complaint(error, f"speclane {command}")
        if told.status != 2:
            raise
        raise InvalidConfig("topology", f"{path}: {told.line}") from None


def parsed(command: str, words: Sequence[str]) -> dict[str, Any]:
    """All options of a command by the names of its parameters. Raises typer's own errors."""
    import typer

    from executor.cli.app import app

    found = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    params: dict[str, Any] = found.make_context(command, list(words)).params
    return params


def _group(group: type[Group], given: Mapping[str, Any]) -> Group:
    return group(**{option.name: given[option.name] for option in fields(group) if option.init})
