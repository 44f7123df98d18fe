"""`speclane keys`: who may attach to a speculator server, and to whom."""

from typing import Annotated

import typer

from executor.cli import options as o
from executor.cli.output import write
from executor.errors import InvalidConfig


def keys(
    directory: Annotated[str, typer.Argument(help="Where to put them.", metavar="DIR")],
    client: Annotated[
        list[str] | None,
        typer.Option(help="Name of a client; repeatable, also later.", metavar="NAME", show_default="client"),
    ] = None,
) -> None:
    """Make key pairs for a speculator server and its clients: a directory for each, for its host alone."""
    from executor.config import local_path
    from ipc.errors import WireError
    from ipc.keys import FIRST_CLIENT, make

    place = local_path("directory", o.valid_text("directory", directory), "./keys")
    try:
        made = make(place, client or [FIRST_CLIENT])
    except WireError as error:
        raise InvalidConfig("client", f"client: {error}") from error
    except OSError as error:
        raise InvalidConfig("DIR", f"DIR {place} cannot be written: {error.strerror}; try ./keys") from error
    for path in made:
        write(f"{path}\n")
