"""`speclane bench simulate`: the scheduler against the formula, with lanes whose steps take a given time."""

from typing import Annotated, Any, get_args

import typer

from executor.cli import options as o
from executor.cli.output import log_to_stderr, write_json
from executor.errors import InvalidConfig


def simulate(
    target_ms: Annotated[float, typer.Option(help="A step of the target.", metavar="MS")] = 10.0,
    draft_ms: Annotated[float, typer.Option(help="A step of the speculator.", metavar="MS")] = 1.0,
    acceptance: Annotated[float, typer.Option(help="How often it is right, 0 to 1.", metavar="A")] = 0.8,
    near: Annotated[
        float, typer.Option(help="How often its second choice is right if not, 0 to 1.", metavar="A")
    ] = 0.8,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.", metavar="B")] = 1,
    mode: Annotated[
        str, typer.Option(help="How to speculate.", metavar="off|sequential|ahead|outcomes|auto")
    ] = "sequential",
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    hypotheses: o.Hypotheses = None,
    ubatches: o.Ubatches = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each sequence.", metavar="N")] = 200,
    repeat: Annotated[int, typer.Option(help="Runs; all count together.", metavar="R")] = 3,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Tokens per target step with simulated lanes, and what the formula says.

    Twice: with lanes that are processes, in real time; and in virtual time, where only their steps take any.
    """
    log_to_stderr(verbose=verbose)
    from executor.bench.simulate import Plan, measure
    from executor.setting import Mode

    for name, share in (("acceptance", acceptance), ("near", near)):
        if not 0 <= share <= 1:
            raise InvalidConfig(name, f"{name} must be from 0 to 1, got {share:g}; try 0.8")
    for name, milliseconds in (("target_ms", target_ms), ("draft_ms", draft_ms)):
        if not 0 < milliseconds <= 1e4:
            option = name.replace("_", "-")
            raise InvalidConfig(
                name, f"{option} must be above 0 and at most 10000, got {milliseconds:g}; try 10"
            )
    modes = ("off", *get_args(Mode))
    if mode not in modes:
        raise InvalidConfig("mode", f"mode must be one of {', '.join(modes)}, got {mode!r}; try sequential")
    o.whole("batch", batch, 1, 1024, 8)
    o.whole("new_tokens", new_tokens, 1, 4000, 200)
    o.whole("repeat", repeat, 1, 1000, 3)
    plan = Plan(
        target_ms=target_ms,
        draft_ms=draft_ms,
        acceptance=acceptance,
        near=near,
        batch=batch,
        mode=mode,  # type: ignore[arg-type]  # one of them, as was just checked
        k=5 if num_speculative_tokens is None else num_speculative_tokens,
        hypotheses=hypotheses,
        ubatches=ubatches,
        new_tokens=new_tokens,
        repeat=repeat,
    )
    result = measure(plan)
    if as_json:
        write_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("time", *(name for name in result if name != "virtual"), box=None)
    for time, figures in (("real", result), ("virtual", result | result["virtual"])):
        shown = [value for name, value in figures.items() if name != "virtual"]
        table.add_row(time, *("-" if value is None else str(value) for value in shown))
    Console().print(table)
