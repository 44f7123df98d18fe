"""`speclane bench pool`: several executors that share one speculator."""

from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ProcessOptions, grouped
from executor.cli.output import log_to_stderr, note, progress_shown, write_json

_PROMPTS = ("Count to one thousand.", "Why is the sky blue?", "Write a poem about two processes.")
_SERVER = (
    *("engine", "dtype", "device", "threads", "cache_dir", "num_speculative_tokens", "max_model_len"),
    *("acceptance", "q_rows"),
)
"""Options that mean the same for the server."""


@grouped
def pool(
    *,
    executors: Annotated[int, typer.Option(help="How many share it.", metavar="N")] = 2,
    seconds: Annotated[float, typer.Option(help="Length of a measurement.", metavar="SECONDS")] = 10.0,
    repeat: Annotated[int, typer.Option(help="Measurements of each mode.", metavar="R")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", metavar="N")] = 64,
    batch: Annotated[int, typer.Option(help="Sequences of each executor.", metavar="B")] = 1,
    temperature: o.Temperature = 0.0,
    model: ProcessOptions,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Tokens per second of executors without speculation, with a speculator each, and with one for all;
    status 1 if their tokens differ."""
    log_to_stderr(verbose=verbose)
    o.whole("executors", executors, 1, 64, 2)
    o.whole("repeat", repeat, 1, 1000, 1)
    o.whole("new_tokens", new_tokens, 1, 1 << 20, 64)
    o.whole("batch", batch, 1, 256, 1)
    from executor.bench.pool import Plan, measure
    from executor.config import check_seconds
    from executor.llm import LLM

    check_seconds("seconds", seconds, works=10.0)
    config = model.config(max_sequences=batch, reuse_prefixes=False)
    given = {name: value for name in _SERVER if (value := getattr(model, name)) is not None}
    server = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    server += [f"--speculator={config.speculator}", f"--clients={executors}", f"--max-sequences={batch}"]
    server += ["--verbose"] * verbose
    if config.engine != "toy":
        server.append(f"--target={config.target}")
    plan = Plan(
        config=config,
        server=server,
        prompts=_PROMPTS,
        executors=executors,
        new_tokens=new_tokens,
        temperature=temperature,
        seconds=seconds,
        repeat=repeat,
    )
    with progress_shown():
        LLM(config)  # refused here, not after minutes
    result = measure(plan, note)
    if as_json:
        write_json(result)
    else:
        _show(result)
    if not result["tokens_agree"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{result['executors']} executors, batch {result['batch']}, K={result['k']}"
    table = Table("speculator", "tok/s", "each", "speedup", "fairness", "tokens/step", title=title, box=None)
    for row in result["rows"]:
        each = ", ".join(f"{one:.1f}" for one in row["tok_s_each"])
        figures = (f"{row[name]:.2f}" for name in ("speedup", "fairness", "acceptance_length"))
        table.add_row(row["mode"], f"{row['tok_s']:.1f}", each, *figures)
    Console().print(table)
