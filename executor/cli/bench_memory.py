"""`speclane bench memory`: whether lanes take what was planned."""

from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ProcessOptions, grouped
from executor.cli.output import log_to_stderr, progress_shown, write_json


@dataclass(frozen=True, kw_only=True)
class _OnCpu(ProcessOptions):
    device: str = field(init=False, default="cpu")
    target_device: None = field(init=False, default=None)
    speculator_device: None = field(init=False, default=None)
    max_model_len: Annotated[
        int, typer.Option(help="Longest sequence in tokens; all are filled up to it.", metavar="N")
    ] = 1024


@grouped
def memory(
    *,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.", metavar="B")] = 4,
    model: _OnCpu,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Fill each lane's KV on the CPU, and compare the peak of its memory with the plan."""
    log_to_stderr(verbose=verbose)
    config = model.config(max_sequences=batch)

    from executor.bench.memory import measure
    from executor.llm import LLM

    with progress_shown():
        llm = LLM(config)
    result = measure(llm)
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
