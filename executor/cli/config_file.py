"""`--config FILE.toml`: options as a file gives them, below those of the command line."""

import tomllib
from pathlib import Path
from typing import Any

import typer

from executor.errors import InvalidConfig


def read_config_file(ctx: typer.Context, path: str | None) -> str | None:
    """Makes what the file says the defaults of the command's options. Raises InvalidConfig."""
    if path is not None:
        options = {parameter.name: parameter for parameter in ctx.command.params if parameter.name}
        given = {_name(key): value for key, value in _read(Path(path)).items()}
        for key, value in given.items():
            if key not in options or key == "config_file":
                known = ", ".join(sorted(name.replace("_", "-") for name in options if name != "config_file"))
                raise InvalidConfig("config", f"config {path}: no option {key!r} here, only {known}")
            if isinstance(value, dict):
                raise InvalidConfig("config", f"config {path}: {key} is a table; give a value")
        ctx.default_map = {**(ctx.default_map or {}), **given}
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig("config", f"config {path}: {error.strerror}; try speclane.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig("config", f"config {path} is no TOML: {error}; try port = 8000") from None


def _name(key: str) -> str:
    return key.replace("-", "_")
