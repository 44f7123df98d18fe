"""`speclane bench invariance`: what batch-invariant numerics cost."""

from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ModelOptions
from executor.cli.output import log_to_stderr, progress_shown, write_json


def invariance(
    target: o.Target = None,
    dtype: o.Dtype = "bf16",
    threads: o.Threads = None,
    cache_dir: o.CacheDir = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Longest draft in tokens, from 1 to 32.", metavar="K")
    ] = 7,
    context: Annotated[int, typer.Option(help="Tokens before the steps measured.", metavar="N")] = 200,
    repeat: Annotated[int, typer.Option(help="Steps of each kind; the median counts.", metavar="R")] = 30,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Cost of batch-invariant numerics: step time with and without them (CPU only)."""
    log_to_stderr(verbose=verbose)
    o.whole("context", context, 1, 1 << 20, 200)
    o.whole("repeat", repeat, 1, 10000, 30)
    native = ModelOptions(
        target=target, speculator="off", device="cpu", dtype=dtype, threads=threads, cache_dir=cache_dir
    )
    config = native.config(max_sequences=1, num_speculative_tokens=num_speculative_tokens)

    from executor.bench.invariance import measure

    with progress_shown():
        result = measure(config, context=context, repeats=repeat)
    if as_json:
        write_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    title = f"{result['target']}, {result['dtype']}, {result['threads']} threads, context {result['context']}"
    table = Table("rows", "plain", "invariant", "ratio", title=escape(title), box=None)
    for row in result["rows"]:
        times = (f"{row[name]:.2f} ms" for name in ("plain_ms", "invariant_ms"))
        table.add_row(str(row["rows"]), *times, f"{row['cost_ratio']:.3f}")
    Console().print(table)
