"""`speclane bench memory`: whether lanes take what was planned."""

from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.output import log_to_stderr, progress_shown, write_json


def memory(
    ctx: typer.Context,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.", metavar="B")] = 4,
    target: o.Target = None,
    speculator: o.Speculator = "auto",
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    engine: o.Engine = "native",
    dtype: o.Dtype = "bf16",
    target_ranks: o.TargetRanks = None,
    max_model_len: Annotated[
        int, typer.Option(help="Longest sequence in tokens; all are filled up to it.", metavar="N")
    ] = 1024,
    memory_budget: o.MemoryBudget = None,
    kv_tokens: o.KvTokens = None,
    threads: o.Threads = None,
    cache_dir: o.CacheDir = None,
    load_timeout: o.LoadTimeout = None,
    draft_timeout: o.DraftTimeout = None,
    verify_timeout: o.VerifyTimeout = None,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Fill each lane's KV on the CPU, and compare the peak of its memory with the plan."""
    log_to_stderr(verbose=verbose)
    config = o.config(ctx.params, max_sequences=batch, device="cpu")

    from executor.bench.memory import measure

    with progress_shown():
        result = measure(config)
    if as_json:
        write_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from executor.sizes import size

    table = Table("lane", "planned", "measured", "ratio", "while loading", box=None, padding=(0, 2))
    for column in table.columns[1:]:
        column.justify = "right"
    for lane in result["lanes"]:
        table.add_row(
            lane["lane"],
            size(lane["planned"]),
            size(lane["measured"]),
            f"{lane['ratio']:.3f}",
            size(lane["load_peak"]),
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{result['held_tokens']} of {result['tokens']} tokens held, batch {result['batch']}")
