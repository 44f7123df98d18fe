"""`speclane bench`: the commands around executor.bench."""

import typer

app = typer.Typer(help="Measure speclane on this machine.")
