"""`speclane launch`: a whole topology of processes from one file."""

from pathlib import Path
from typing import Annotated

import typer

from executor.cli import quitting
from executor.cli.output import log_to_stderr, note, write


def launch(
    topology: Annotated[
        str, typer.Argument(help="TOML file, such as deploy/topologies/cpu.toml.", metavar="TOPOLOGY")
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show processes, devices, memory and checks; start nothing.")
    ] = False,
    host: Annotated[
        str | None,
        typer.Option(
            help="Address for all targets to listen on, such as 0.0.0.0 in a container.",
            metavar="HOST",
            show_default="as the topology says",
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            help="Where status.json and logs are kept.",
            metavar="DIRECTORY",
            show_default="$STATE_DIRECTORY/NAME, else ~/.local/state/speclane/NAME",
        ),
    ] = None,
) -> None:
    """Start the processes of a topology, watch and restart them; SIGTERM or Ctrl-C drains them.

    Exit status: 0 all drained, 1 a process failed for good, 2 it cannot run here, 3 answers were cut off.
    """
    log_to_stderr(verbose=True)

    from executor.launch import run
    from executor.launch.show import show, show_findings

    prepared = run.prepare(Path(topology).expanduser(), host)
    findings = run.check(prepared)
    if dry_run:
        write(show(prepared.plan) + show_findings(findings))
        run.refuse(findings)
        return
    run.refuse(findings)
    for finding in findings:
        if finding.level == "warning":
            note(f"warning: {finding.subject}: {finding.found}; {finding.advice}")
    status = run.run(prepared, state)
    quitting.on_signals()
    if status:
        raise typer.Exit(status)
