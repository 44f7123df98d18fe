"""`speclane bench http`: what the server costs."""

from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.output import log_to_stderr, write_json


def http(
    streams: Annotated[int, typer.Option(help="Streams at once.", metavar="N")] = 8,
    tokens: Annotated[int, typer.Option(help="Of each stream.", metavar="N")] = 400,
    step_ms: Annotated[float, typer.Option(help="How long a target's step takes.", metavar="MS")] = 25.0,
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """How much later a client has a token than the coordinator, and the CPU time of serving it."""
    log_to_stderr(verbose=verbose)
    o.whole("streams", streams, 1, 1024, 8)
    o.whole("tokens", tokens, 1, 100_000, 400)

    from executor.bench.http import measure

    k = 5 if num_speculative_tokens is None else num_speculative_tokens
    result = measure(streams=streams, tokens=tokens, k=k, step_ms=step_ms)
    if as_json:
        write_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row(
        "streams", f"{result['streams']}, drafts of {result['k']} tokens, steps of {result['step_ms']} ms"
    )
    table.add_row("delay", f"p50 {result['delay_ms']['p50']} ms, p99 {result['delay_ms']['p99']} ms")
    table.add_row("CPU", f"{result['cpu_us_per_token']} µs a token more than without HTTP")
    table.add_row("speed", f"{result['tok_s']['http']} tok/s, without HTTP {result['tok_s']['direct']} tok/s")
    Console().print(table)
