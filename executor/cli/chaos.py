"""`speclane chaos`: what a user would have noticed of lanes that died."""

import logging
import math
import signal
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ProcessOptions, grouped
from executor.cli.output import log, log_to_stderr, note, progress_shown, write_json
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from executor.chaos.plan import FaultKind, Plan

_USUAL_KILLS = 3
_MOST_FAULTS = 1000
_OFTEN_RIGHT = "agree=0.8"


def _faults(text: str) -> Any:
    return typer.Option(help=text, metavar="N", rich_help_panel="Faults")


def _traffic(metavar: str, text: str) -> Any:
    return typer.Option(help=text, metavar=metavar, rich_help_panel="Traffic")


@dataclass(frozen=True, kw_only=True)
class _Traffic:
    requests: Annotated[int, _traffic("R", "Requests of a round.")] = 64
    concurrency: Annotated[int, _traffic("C", "Requests that run at once.")] = 8
    minutes: Annotated[float, _traffic("X", "Repeat it all until so many minutes have passed.")] = 0.0
    max_tokens: Annotated[int, _traffic("N", "Tokens of the longest answers.")] = 64
    temperature: Annotated[float, _traffic("T", "0 is greedy.")] = 0.0
    seed: Annotated[int, _traffic("S", "Same seed, same prompts, samples and faults.")] = 0


@dataclass(frozen=True, kw_only=True)
class _Faults:
    kill_speculator: Annotated[
        int | None, _faults("Kill the speculator N times; 3 if there is one. Rounds go on until all struck.")
    ] = None
    kill_target: Annotated[int, _faults("Kill the target N times.")] = 1
    stop_speculator: Annotated[int, _faults("Stop (SIGSTOP) the speculator N times, so that it hangs.")] = 0


@dataclass(frozen=True, kw_only=True)
class _Model(ProcessOptions):
    speculator: Annotated[
        str,
        typer.Option(
            help="What drafts; auto with --engine toy is a toy that is often right.",
            metavar="off|ngram|suffix|eagle|cascade|MODEL",
            rich_help_panel="Model",
        ),
    ] = "auto"


@grouped
def chaos(
    traffic: _Traffic, faults: _Faults, model: _Model, as_json: o.Json = False, verbose: o.Verbose = False
) -> None:
    """Kill lanes under traffic, and compare every token with an undisturbed run.

    Run it on your own machine, with your own models, before you go live.
    First the target alone answers all requests. Then rounds of the same
    requests run with speculation while lanes are killed.

    The status is 1 if a request failed, a token differed, something was left
    behind, or a lane did not come back to work.
    """
    log_to_stderr(verbose=verbose)
    plan = _plan(traffic, faults, model)

    from executor.chaos.run import measure, prepare

    with progress_shown():
        prepared = prepare(plan)
    if not verbose:
        log.setLevel(logging.ERROR)  # that lanes died is no news here, what came of it is the result
    result = measure(plan, prepared, note)
    if as_json:
        write_json(result)
    else:
        _show(result)
    if any((result["mismatches"], result["failed"], *result["leaks"].values(), not result["recovered"])):
        raise typer.Exit(1)


def _plan(traffic: _Traffic, faults: _Faults, model: _Model) -> "Plan":
    """Raises InvalidConfig or InvalidRequest before anything is loaded."""
    from executor.chaos.plan import MIN_ANSWER, RESTARTS, STRIKES, Plan
    from executor.config import Recovery
    from executor.sampling import SamplingParams

    o.whole("requests", traffic.requests, 1, 1 << 20, 64)
    o.whole("concurrency", traffic.concurrency, 1, 256, 8)
    o.whole("max_tokens", traffic.max_tokens, MIN_ANSWER, 1 << 20, 64)
    if not 0 <= traffic.minutes < math.inf:
        raise InvalidConfig("minutes", f"--minutes must be 0 or more, got {traffic.minutes}; try 5")
    SamplingParams(temperature=traffic.temperature, seed=traffic.seed)
    counts = _fault_counts(faults, model.speculator)
    if model.speculator == "auto" and model.engine == "toy":
        toy = ",".join(filter(None, (model.target or "vocabulary=256", _OFTEN_RIGHT)))
        model = replace(model, speculator=toy)
    return Plan(
        config=model.config(
            max_sequences=traffic.concurrency, recovery=Recovery(policy=RESTARTS, strikes=STRIKES)
        ),
        faults=counts,
        requests=traffic.requests,
        max_tokens=traffic.max_tokens,
        temperature=traffic.temperature,
        seed=traffic.seed,
        minutes=traffic.minutes,
    )


def _fault_counts(faults: _Faults, speculator: str) -> "dict[FaultKind, int]":
    from executor.chaos.plan import FaultKind

    usual = 0 if speculator == "off" else _USUAL_KILLS
    counts = {
        "kill_speculator": usual if faults.kill_speculator is None else faults.kill_speculator,
        "kill_target": faults.kill_target,
        "stop_speculator": faults.stop_speculator,
    }
    for name, count in counts.items():
        o.whole(name, count, 0, _MOST_FAULTS, _USUAL_KILLS)
        if speculator == "off" and count and name != "kill_target":
            option = "--" + name.replace("_", "-")
            raise InvalidConfig(name, f"{option} {count} contradicts --speculator off; leave it out")
    return {
        FaultKind("speculator", signal.SIGKILL): counts["kill_speculator"],
        FaultKind("target", signal.SIGKILL): counts["kill_target"],
        FaultKind("speculator", signal.SIGSTOP): counts["stop_speculator"],
    }


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_row("requests", f"{result['requests']} in {result['rounds']} rounds, {result['failed']} failed")
    table.add_row(
        "tokens", f"{result['tokens']} in {result['seconds']:.1f} s, {result['mismatches']} answers differ"
    )
    kills, stops, deaths = result["kills"], result["stops"], result["deaths"]
    for lane in ("speculator", "target"):
        told = f"{kills[lane]} killed, {stops.get(lane, 0)} stopped, {deaths[lane]} deaths"
        table.add_row(lane, f"{told}, {_back(result['events'], lane)}")
    stalls = result["stall_steps"]
    table.add_row(
        "pauses",
        f"p50 {stalls['p50']:.1f}, p99 {stalls['p99']:.1f}, longest {stalls['max']:.1f} "
        f"plain steps of {result['step_ms']:.2f} ms",
    )
    table.add_row("recovered", "yes" if result["recovered"] else "no")
    left = ", ".join(f"{count} {kind}" for kind, count in result["leaks"].items() if count)
    table.add_row("left behind", left or "nothing")
    table.add_row("memory", f"coordinator {result['rss_drift']:+.1%} since the warm-up")
    Console().print(table)


def _back(events: list[dict[str, Any]], lane: str) -> str:
    seconds = [e["back_seconds"] for e in events if e["lane"] == lane and e["back_seconds"] is not None]
    return f"back after at most {max(seconds):.2f} s" if seconds else "never away"
