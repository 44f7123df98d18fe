"""The tree of commands."""

from typing import Annotated

import typer

from executor.cli import (
    bench,
    chaos,
    chat,
    doctor,
    generate,
    keys,
    launch,
    ping,
    plan,
    prune,
    serve,
    speculator,
    status,
    swap_speculator,
    top,
    version,
)
from executor.cli.output import log_to_stderr, write

app = typer.Typer(
    name="speclane",
    help="Speculative decoding with the target model and its speculator in processes of their own.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def speclane(
    ctx: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    log_to_stderr(verbose=False)
    if show_version:
        version.version()
    elif ctx.invoked_subcommand is None:
        write(ctx.get_help() + "\n")
    else:
        return
    raise typer.Exit


app.command()(serve.serve)
app.command("speculator")(speculator.speculator_server)
app.command()(ping.ping)
app.command()(keys.keys)
app.command()(launch.launch)
app.command()(chat.chat)
app.command()(generate.generate)
app.command()(plan.plan)
app.command()(prune.prune)
app.command()(chaos.chaos)
app.add_typer(bench.app, name="bench")
app.command()(status.status)
app.command()(top.top)
app.command()(doctor.doctor)
app.command("swap-speculator")(swap_speculator.swap_speculator)
app.command()(version.version)
