"""`speclane bench distance`: what a speculator server brings that is farther and farther away."""

from functools import partial
from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.bench_pool import Prompts, prompts_of, run, server_words
from executor.cli.groups import ProcessOptions, grouped
from executor.cli.output import log_to_stderr


@grouped
def distance(
    *,
    round_trips: Annotated[
        str, typer.Option(help="Added to the way there and back, in milliseconds.", metavar="MS,MS")
    ] = "0,1,5,20",
    seconds: Annotated[float, typer.Option(help="Length of a turn.", metavar="SECONDS")] = 10.0,
    repeat: Annotated[int, typer.Option(help="Turns of each.", metavar="R")] = 3,
    prompts: Prompts = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", metavar="N")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.", metavar="B")] = 1,
    temperature: o.Temperature = 0.0,
    model: ProcessOptions,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Tokens per second with a speculator server at several distances, as share of the speed without
    speculation; status 1 if their tokens differ."""
    log_to_stderr(verbose=verbose)
    o.whole("repeat", repeat, 1, 1000, 3)
    o.whole("new_tokens", new_tokens, 1, 1 << 20, 64)
    o.whole("batch", batch, 1, 256, 1)
    from executor.bench.distance import Plan, measure, parse_round_trips
    from executor.bench.stretch import Work
    from executor.config import check_seconds

    check_seconds("seconds", seconds, works=10.0)
    distances = parse_round_trips(round_trips)
    config = model.config(max_sequences=batch, reuse_prefixes=False)
    plan = Plan(
        config=config,
        server=server_words(model, config, clients=1, verbose=verbose),
        work=Work(prompts=prompts_of(prompts), new_tokens=new_tokens, temperature=temperature, at_once=batch),
        round_trips=distances,
        seconds=seconds,
        repeat=repeat,
    )
    run(partial(measure, plan), config, _show, as_json=as_json)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"batch {result['batch']}, K={result['k']}"
    table = Table("round trip", "tok/s", "of plain", "tokens/step", "chosen last", title=title, box=None)
    for row in result["rows"]:
        way = row["round_trip_ms"]
        figures = (f"{row[name]:.2f}" for name in ("share", "tokens_per_step"))
        table.add_row(
            *("no speculation" if way is None else f"{way:g} ms", f"{row['tok_s']:.1f}"),
            *(*figures, row["setting"]),
        )
    Console().print(table)
