"""`speclane bench pool`: several executors that share one speculator."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ProcessOptions, grouped
from executor.cli.output import log_to_stderr, note, progress_shown, write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from executor.config import Config

Prompts = Annotated[
    str | None,
    typer.Option(
        help="JSON lines with question_id, category, turns; copy-heavy and lane-bench are shipped.",
        metavar="copy-heavy|lane-bench|FILE",
        show_default="lane-bench",
    ),
]
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
    prompts: Prompts = None,
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
    from executor.bench.stretch import Work
    from executor.config import check_seconds

    check_seconds("seconds", seconds, works=10.0)
    config = model.config(max_sequences=batch, reuse_prefixes=False)
    plan = Plan(
        config=config,
        server=server_words(model, config, clients=executors, verbose=verbose),
        work=Work(prompts=prompts_of(prompts), new_tokens=new_tokens, temperature=temperature, at_once=batch),
        executors=executors,
        seconds=seconds,
        repeat=repeat,
    )
    run(partial(measure, plan), config, _show, as_json=as_json)


def run(
    measure: "Callable[[Callable[[str], None]], dict[str, Any]]",
    config: "Config",
    show: "Callable[[dict[str, Any]], None]",
    *,
    as_json: bool,
) -> None:
    """Measure executors of this config; exit with status 1 if what they said differs."""
    from executor.llm import LLM

    with progress_shown():
        LLM(config)  # refused here, not after minutes
    result = measure(note)
    if as_json:
        write_json(result)
    else:
        show(result)
    if not result["tokens_agree"]:
        raise typer.Exit(1)


def server_words(model: ProcessOptions, config: "Config", *, clients: int, verbose: bool) -> list[str]:
    """Options of `speclane speculator` that say of a server what was said of its executors."""
    given = {name: value for name in _SERVER if (value := getattr(model, name)) is not None}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    words += [f"--speculator={config.speculator}", f"--clients={clients}"]
    words += [f"--max-sequences={config.max_sequences}", *["--verbose"] * verbose]
    return words if config.engine == "toy" else [*words, f"--target={config.target}"]


def prompts_of(file: str | None) -> list[str]:
    """What users say, of all categories in turn. Raises InvalidConfig about `prompts`."""
    from executor.bench.prompts import LANE_BENCH, SHIPPED, mixed, read_prompts
    from executor.config import local_path

    path = SHIPPED.get(file or "") or (
        LANE_BENCH if file is None else local_path("prompts", file, "lane-bench")
    )
    return [prompt.text for prompt in mixed(read_prompts(path))]


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
