"""`speclane swap-speculator`: another speculator for an executor that is running."""

import os
from typing import Annotated

import typer

from executor.cli import options
from executor.cli.output import write


def swap_speculator(
    model: Annotated[
        str,
        typer.Argument(
            help="off, ngram, suffix, eagle, cascade, an alias, a checkpoint directory or a hub id.",
            metavar="MODEL",
        ),
    ],
    pid: options.Pid = None,
    load_timeout: Annotated[float, typer.Option(help="Time until it must serve.", metavar="SECONDS")] = 600.0,
) -> None:
    """Go on with another speculator. It loads while the present one serves; texts do not change."""
    from executor import control_client
    from executor.config import check_seconds

    check_seconds("load_timeout", load_timeout, works=600.0)
    options.valid_text("model", model)
    executor = control_client.choose(pid)
    write(f"speculator: {control_client.swap_speculator(executor, from_anywhere(model), load_timeout)}\n")


def from_anywhere(model: str) -> str:
    """The executor runs in another directory, so that of a checkpoint is given in full."""
    from executor.config import SPECULATORS, local_path
    from executor.heads import SUFFIX
    from executor.models import ALIASES

    if model in ("", *SPECULATORS, *ALIASES):
        return model
    path = local_path("model", model, "ngram")
    return str(path.absolute()) if os.path.isdir(path) or path.suffix == SUFFIX else model
