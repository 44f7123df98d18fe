"""`speclane plan`: how much memory each lane will take, and how many tokens all can hold."""

from typing import TYPE_CHECKING, Annotated

import typer

from executor.cli import options as o
from executor.cli.groups import ProcessOptions, RecoveryOptions, grouped
from executor.cli.output import log, log_to_stderr, progress_shown, write_json

if TYPE_CHECKING:
    from executor.capacity import MemoryPlan


@grouped
def plan(
    *,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.", metavar="B")] = 8,
    model: ProcessOptions,
    recovery: RecoveryOptions,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Load both lanes, measure their worst shapes, show the memory plan, and end. Nothing is served."""
    log_to_stderr(verbose=verbose)
    config = model.config(recovery=recovery.recovery(), max_sequences=batch)

    from executor.model import prepare
    from executor.planning import plan_memory, rows

    with progress_shown():
        prepared = prepare(config, log.info)
    made = plan_memory(prepared, config)
    if as_json:
        lanes = [row.as_dict() for row in rows(made)]
        write_json({"lanes": lanes, "tokens": made.tokens, "budgets": dict(made.budgets)})
    else:
        show(made)


def show(made: "MemoryPlan") -> None:
    from rich.console import Console
    from rich.table import Table

    from executor.planning import rows
    from executor.sizes import size

    lanes = rows(made)
    table = Table("", *(f"{row.name} ({row.device})" for row in lanes), box=None, padding=(0, 2))
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("process", "weights", "activations", "workspace", "graphs", "kv", "total", "peak"):
        table.add_row(name, *(size(getattr(row, name)) for row in lanes))
    table.add_row("kv per token", *(size(row.kv_bytes_per_token) for row in lanes))
    table.add_row("kv tokens", *(str(row.kv_tokens) for row in lanes))
    if any(row.copies > 1 for row in lanes):
        table.add_row("processes", *(str(row.copies) for row in lanes))
    console = Console(highlight=False)
    console.print(table)
    taken = ", ".join(
        f"{size(made.taken(device))} of {size(budget)} on {_name(made, device)}"
        for device, budget in made.budgets.items()
    )
    console.print(f"{made.tokens} tokens fit on all lanes: {taken}")


def _name(made: "MemoryPlan", device: str) -> str:
    return next(lane.profile.device for lane in made.lanes if lane.profile.device_id == device)
