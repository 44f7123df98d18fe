"""`speclane bench handoff`: what it costs to hand a tensor to another lane."""

from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.output import log_to_stderr, write_json

_COUNT = 300


def handoff(
    count: Annotated[int, typer.Option(help="Hand-offs each way.", metavar="N")] = _COUNT,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """A block of 11 MB by shared memory and within a message, side by side, between real processes."""
    log_to_stderr(verbose=verbose)
    o.whole("count", count, 10, 100_000, _COUNT)

    from executor.bench.handoff import measure

    result = measure(count=count)
    if as_json:
        write_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row(
        "block", f"{result['shape']} float32, {result['bytes'] / 1e6:.1f} MB, {result['transport']}"
    )
    for way, name in (
        ("descriptor", "written in place"),
        ("copy", "copied into the arena"),
        ("message", "within the message"),
        ("bare", "nothing handed over"),
    ):
        times = result[f"{way}_us"]
        table.add_row(name, f"p50 {times['p50']:.1f} µs, p99 {times['p99']:.1f} µs")
    table.add_row("in place", f"{result['times_less']:.1f} times less than within the message")
    table.add_row("descriptor", f"{result['overhead_us']:.1f} µs more than nothing")
    table.add_row("its work", f"p50 {result['work_us']['p50']:.1f} µs of computing, on both sides")
    Console().print(table)
