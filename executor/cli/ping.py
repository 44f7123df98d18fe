"""`speclane ping`: whether a speculator server answers."""

from typing import Annotated

import typer

from executor.cli import options as o
from executor.cli.output import write


def ping(
    address: Annotated[str, typer.Argument(help="Where it serves, as for --speculator.", metavar="ADDRESS")],
    keys: o.Keys = None,
    timeout: Annotated[float, typer.Option(help="Time to answer.", metavar="SECONDS")] = 5.0,
) -> None:
    """Ask a speculator server whether it is there; status 1 if it does not answer. It counts as no client."""
    from executor.address import parse
    from executor.config import check_seconds, check_servers, local_path
    from executor.remote import client_keys
    from ipc.ping import ping as knock

    check_seconds("timeout", timeout, works=5.0)
    place = None if keys is None else local_path("keys", keys, "./keys")
    server = parse(address, "address")
    check_servers("address", server.text, place)
    greeted = knock(server.text, None if place is None else client_keys(place), timeout)
    write(f"{server.text} answers: process {greeted.pid}, wire version {greeted.wire_version}\n")
