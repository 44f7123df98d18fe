"""`speclane doctor`: whether this machine is fit for it, and what to change."""

import typer

from executor.cli import options as o
from executor.cli.output import write_json

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "error": "[red]error[/]"}


def doctor(cache_dir: o.CacheDir = None, as_json: o.Json = False) -> None:
    """Look at CPU, memory, limits, GPUs, IPC and MPS, and say what to change. Exits with 1 for an error."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from executor.config import local_path
    from executor.doctor import gather, judge
    from executor.models import cache_directory

    given = None if cache_dir is None else local_path("cache_dir", cache_dir, "./models")
    findings = judge(gather(cache_directory(given)))
    if as_json:
        write_json({"findings": [finding._asdict() for finding in findings]})
    else:
        table = Table.grid(padding=(0, 2))
        for finding in findings:
            advice = f"\n→ {escape(finding.advice)}" if finding.advice else ""
            table.add_row(
                _MARKS[finding.level], f"[bold]{finding.subject}[/]", escape(finding.found) + advice
            )
        Console().print(table)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)
