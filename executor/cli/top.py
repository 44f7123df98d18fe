"""`speclane top`: a running executor, live in the terminal."""

import sys
import time
from contextlib import nullcontext
from typing import Annotated

import typer

from executor.cli import options
from executor.cli.output import write_json
from executor.errors import InvalidConfig


def top(
    pid: options.Pid = None,
    interval: Annotated[float, typer.Option(help="Between two looks.", metavar="SECONDS")] = 0.5,
    count: Annotated[
        int | None, typer.Option(help="Stop after so many looks.", metavar="N", show_default="never")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write a JSON object for each look.")] = False,
) -> None:
    """Watch lanes, speed and acceptance of the executor that is running. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    from executor import control_client
    from executor.cli.top_view import TopView
    from executor.config import check_seconds

    check_seconds("interval", interval, works=0.5)
    if count is not None:
        options.whole("count", count, 1, 1 << 30, 10)
    if not as_json and not sys.stdout.isatty():
        raise InvalidConfig("json", "stdout is no terminal to draw in; try --json")
    executor = control_client.choose(pid)
    view = TopView()
    drawn = Live(view, console=Console(), auto_refresh=False, screen=False)
    looks = 0
    with nullcontext() if as_json else drawn:
        while count is None or looks < count:
            if looks:
                time.sleep(interval)
            view.add(control_client.status(executor).status, time.time())
            looks += 1
            if as_json:
                write_json(view.as_dict())
            else:
                drawn.refresh()
