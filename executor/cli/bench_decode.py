"""`speclane bench decode`: decoding speed with and without speculation."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ModelOptions, grouped
from executor.cli.output import log, log_to_stderr, note, progress_shown, write_json
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from executor.bench.decode import Plan

_MODES = "off,sequential"
_ALL_MODES = "off,sequential,ahead,outcomes,auto"


@dataclass(frozen=True, kw_only=True)
class _Runs:
    prompts: Annotated[
        str | None,
        typer.Option(
            help="JSON lines with question_id, category, turns; copy-heavy and lane-bench are shipped.",
            metavar="copy-heavy|lane-bench|FILE",
            show_default="copy-heavy",
        ),
    ] = None
    limit: Annotated[int | None, typer.Option(help="Only the first L prompts.", metavar="L")] = None
    each: Annotated[
        int | None, typer.Option(help="Only the first E prompts of each category.", metavar="E")
    ] = None
    new_tokens: Annotated[int, typer.Option(help="Tokens to decode per prompt.", metavar="N")] = 64
    batch: Annotated[int, typer.Option(help="Sequences that run at once.", metavar="B")] = 1
    modes: Annotated[str, typer.Option(help="Modes to compare, with commas.", metavar=_ALL_MODES)] = _MODES
    repeat: Annotated[int, typer.Option(help="Runs per mode; the median counts.", metavar="R")] = 3
    raw: o.Raw = False
    temperature: o.Temperature = 0.0
    seed: Annotated[
        int, typer.Option(help="Seed of the first prompt; the next has one more.", metavar="S")
    ] = 0


@grouped
def decode(runs: _Runs, model: ModelOptions, as_json: o.Json = False, verbose: o.Verbose = False) -> None:
    """Tokens per second with and without speculation, in turns; status 1 if their tokens differ.

    With --acceptance rejection or block and a temperature they may.
    """
    log_to_stderr(verbose=verbose)
    plan = _plan(runs, model)

    from executor.bench.decode import measure, prepare

    with progress_shown():
        executors = prepare(plan)
    result = measure(plan, executors, note)
    if as_json:
        write_json(result)
    else:
        _show(result)
    _warn(result)
    if not (result["tokens_agree"] or _may_differ(result)):
        raise typer.Exit(1)


def _plan(runs: _Runs, model: ModelOptions) -> "Plan":
    """Raises InvalidConfig or InvalidRequest before anything is loaded."""
    from executor.bench.decode import Plan, parse_modes
    from executor.bench.prompts import COPY_HEAVY, SHIPPED, read_prompts
    from executor.config import local_path
    from executor.sampling import SamplingParams

    for name, works in (("new_tokens", 64), ("repeat", 3), ("limit", 8), ("each", 5)):
        if (given := getattr(runs, name)) is not None:
            o.whole(name, given, 1, 1 << 20, works)
    o.whole("batch", runs.batch, 1, 1024, 8)
    modes = parse_modes(runs.modes)
    speculating = [mode for mode in modes if mode != "off"]
    if model.speculator == "off" and speculating:
        raise InvalidConfig(
            "speculator",
            f"--speculator off contradicts --modes with {speculating[0]}; try --speculator auto",
        )
    SamplingParams(temperature=runs.temperature, seed=runs.seed)
    file = runs.prompts
    shipped = COPY_HEAVY if file is None else SHIPPED.get(file)
    prompts = shipped or local_path("prompts", file, str(COPY_HEAVY))
    return Plan(
        config=model.config(max_sequences=runs.batch, reuse_prefixes=False),
        prompts=read_prompts(prompts, runs.limit, runs.each),
        modes=modes,
        new_tokens=runs.new_tokens,
        temperature=runs.temperature,
        seed=runs.seed,
        repeat=runs.repeat,
        raw=runs.raw,
    )


def _warn(result: dict[str, Any]) -> None:
    if result["prompts"] < result["batch"]:
        log.warning("only %d prompts for a batch of %d", result["prompts"], result["batch"])
    for row in result["rows"]:
        if row["speedup"] is not None and row["speedup"] < 1:
            log.warning("%s is slower than no speculation: speedup %.2f", row["mode"], row["speedup"])
    if not (result["tokens_agree"] or _may_differ(result)):
        log.warning("the runs decoded different tokens: see tokens_sha256")


def _may_differ(result: dict[str, Any]) -> bool:
    """Whether texts hang on what was drafted."""
    return bool(result["acceptance"] != "coupled" and result["temperature"] > 0.0)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    title = f"{result['target']}, {result['dtype']}, {result['threads']} threads, batch {result['batch']}"
    title += f", {result['acceptance']} acceptance"
    columns = ("mode", "tok/s", "speedup", "length", "by position", "draft", "verify", "wire", "tokens")
    caption = "length: tokens per target step; draft, verify, wire: milliseconds per round"
    table = Table(*columns, title=escape(title), caption=caption, box=None)
    for row in result["rows"]:
        split = row["round_ms"]
        table.add_row(
            row["mode"],
            f"{row['tok_s']:.2f}",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            f"{row['acceptance_length']:.2f}",
            " ".join(f"{share:.0%}" for share in row["acceptance_by_position"]) or "-",
            *(f"{split[part]:.2f}" for part in ("draft", "verify", "wire")),
            row["tokens_sha256"][:8],
        )
    Console().print(table)
    _show_categories(result["rows"])


def _show_categories(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("category", "mode", "tok/s", "speedup", "length", "by position", box=None)
    categories = rows[0]["categories"] if rows else {}
    for category in categories if len(categories) > 1 else ():
        for row in rows:
            part = row["categories"][category]
            table.add_row(
                escape(category) or "-",
                row["mode"],
                f"{part['tok_s']:.2f}",
                "-" if part["speedup"] is None else f"{part['speedup']:.2f}",
                f"{part['acceptance_length']:.2f}",
                " ".join(f"{share:.0%}" for share in part["acceptance_by_position"]) or "-",
            )
    if table.row_count:
        Console().print(table)
