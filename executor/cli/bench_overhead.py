"""`speclane bench overhead`: what a round costs beside the models."""

from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.output import log_to_stderr, write_json

_REPEATS = 5


def overhead(
    batch: Annotated[int, typer.Option(help="Sequences per round.", metavar="B")] = 1,
    rounds: Annotated[int, typer.Option(help="Rounds per repeat.", metavar="N")] = 500,
    repeat: Annotated[int, typer.Option(help="Repeats; the median counts.", metavar="R")] = _REPEATS,
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Time of coordinator and wire per round: real processes, models that compute nothing."""
    log_to_stderr(verbose=verbose)
    o.whole("batch", batch, 1, 1024, 8)
    o.whole("rounds", rounds, 10, 2000, 500)
    o.whole("repeat", repeat, 1, 1000, _REPEATS)

    from executor.bench.overhead import measure

    k = 5 if num_speculative_tokens is None else num_speculative_tokens
    result = measure(batch=batch, k=k, rounds=rounds, repeats=repeat)
    if as_json:
        write_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("batch", f"{result['batch']}, drafts of {result['k']} tokens")
    table.add_row("round", f"p50 {result['round_us']['p50']:.1f} µs, p99 {result['round_us']['p99']:.1f} µs")
    table.add_row("floor", f"{result['floor_us']:.1f} µs: two bare round trips between processes")
    table.add_row("over floor", f"{result['over_floor_us']:.1f} µs")
    table.add_row("per sequence", f"{result['per_sequence_us']:.1f} µs")
    for lane, name in (("draft", "speculator"), ("verify", "target")):
        table.add_row(f"{name} lane", f"{result['lanes_us'][lane]:.1f} µs of its own, not counted above")
    Console().print(table)
