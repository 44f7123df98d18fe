"""`speclane bench decode`: decoding speed with and without speculation."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ModelOptions, grouped
from executor.cli.output import log, log_to_stderr, note, progress_shown, write_json
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

    from executor.bench.decode_plan import Plan, Variant
    from executor.llm import LLM

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
    batch: Annotated[
        str, typer.Option(help="Sequences that run at once; several numbers with commas.", metavar="B")
    ] = "1"
    modes: Annotated[str, typer.Option(help="Modes to compare, with commas.", metavar=_ALL_MODES)] = _MODES
    repeat: Annotated[int, typer.Option(help="Runs per mode; the median counts.", metavar="R")] = 3
    raw: o.Raw = False
    temperature: o.Temperature = 0.0
    seed: Annotated[
        int, typer.Option(help="Seed of the first prompt; the next has one more.", metavar="S")
    ] = 0
    html: Annotated[
        str | None,
        typer.Option(help="Write a report with plots, one page without other files.", metavar="FILE"),
    ] = None
    peers: Annotated[
        str | None,
        typer.Option(
            help="Also run other engines by run_hf.py and run_vllm.py of a directory, in turns with ours.",
            metavar="DIR",
        ),
    ] = None
    peer_python: Annotated[
        str | None, typer.Option(help="Interpreter that has vLLM, for run_vllm.py.", metavar="PATH")
    ] = None


@grouped
def decode(runs: _Runs, model: ModelOptions, as_json: o.Json = False, verbose: o.Verbose = False) -> None:
    """Tokens per second with and without speculation, in turns; status 1 if their tokens differ.

    With --acceptance rejection or block and a temperature they may. Several of --acceptance or --lanes, with
    commas, are compared; the speedup is over no speculation in the first kind of lanes.
    """
    log_to_stderr(verbose=verbose)
    plan = _plan(runs, model)

    from executor.bench.decode import measure, prepare, together
    from executor.bench.decode_plan import at_batches, parse_batches
    from executor.cli.decode_table import show

    report = None if runs.html is None else _report_file(runs.html)
    plans = at_batches(plan, parse_batches(runs.batch))
    with progress_shown():
        prepared = [(each, prepare(each)) for each in plans]
    results = [measure(each, executors, note) for each, executors in prepared]
    result = together(results)
    if report is not None:
        report.write_text(_report(result, prepared), encoding="utf-8")
    if as_json:
        write_json(result)
    else:
        show(result)
    _warn(result)
    if not result["promise_kept"]:
        raise typer.Exit(1)


def _plan(runs: _Runs, model: ModelOptions) -> "Plan":
    """Raises InvalidConfig or InvalidRequest before anything is loaded."""
    from executor.bench.decode_plan import (
        Plan,
        parse_acceptances,
        parse_batches,
        parse_lanes,
        parse_modes,
    )
    from executor.bench.peers import find_peers
    from executor.bench.prompts import COPY_HEAVY, SHIPPED, read_prompts
    from executor.config import local_path
    from executor.sampling import SamplingParams

    for name, works in (("new_tokens", 64), ("repeat", 3), ("limit", 8), ("each", 5)):
        if (given := getattr(runs, name)) is not None:
            o.whole(name, given, 1, 1 << 20, works)
    batches = parse_batches(runs.batch)
    modes = parse_modes(runs.modes)
    ways = parse_acceptances(model.acceptance)
    hostings = parse_lanes(model.lanes)
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
    if runs.peers is None and runs.peer_python is not None:
        raise InvalidConfig("peer_python", "peer-python says nothing without --peers; try --peers DIR")
    if runs.peers is not None and runs.raw:
        raise InvalidConfig("raw", "raw contradicts --peers, whose prompts are chats; leave --raw out")
    return Plan(
        config=replace(model, acceptance=ways[0], lanes=hostings[0]).config(
            max_sequences=batches[0], reuse_prefixes=False
        ),
        prompts=read_prompts(prompts, runs.limit, runs.each),
        modes=modes,
        acceptances=ways,
        hostings=hostings,
        new_tokens=runs.new_tokens,
        temperature=runs.temperature,
        seed=runs.seed,
        repeat=runs.repeat,
        raw=runs.raw,
        peers=find_peers(local_path("peers", runs.peers, "."), runs.peer_python)
        if runs.peers is not None
        else (),
        timeline=runs.html is not None,
    )


def _report_file(name: str) -> "Path":
    """Raises InvalidConfig, before anything is measured, if it cannot be written."""
    from executor.config import local_path

    file = local_path("html", name, "report.html")
    try:
        file.touch()
    except OSError as error:
        raise InvalidConfig("html", f"--html {file}: {error.strerror}; try report.html") from None
    return file


def _report(result: dict[str, Any], prepared: "list[tuple[Plan, dict[Variant, LLM]]]") -> str:
    """A page. The executors must have been closed."""
    from executor.bench.report.decode_report import decode_report
    from executor.bench.report.timeline import last_rounds

    timelines = {
        (plan.name(variant), plan.config.max_sequences): last_rounds(llm.trace.events)
        for plan, executors in prepared
        for variant, llm in executors.items()
        if llm.trace is not None
    }
    return decode_report(result, timelines)


def _warn(result: dict[str, Any]) -> None:
    batches = result["batch"] if isinstance(result["batch"], list) else [result["batch"]]
    if result["prompts"] < max(batches):
        log.warning("only %d prompts for a batch of %d", result["prompts"], max(batches))
    own = [row for row in result["rows"] if row["mode"] is not None]
    plain = {(row["batch"], row["lanes"]): row["tok_s"] for row in own if row["mode"] == "off"}
    for row in own:
        off = plain.get((row["batch"], row["lanes"]))
        if off is not None and row["tok_s"] < off:
            share = row["tok_s"] / off
            log.warning("%s is slower than no speculation: speedup %.2f", row["method"], share)
    for row in result["rows"]:
        if row["mode"] is None and row["tok_s"] is None:
            log.warning("%s %s failed: %s", row["engine"], row["method"], row["error"])
    if not result["promise_kept"]:
        log.warning("the runs decoded different tokens: see tokens_sha256")
