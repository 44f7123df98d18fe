"""`speclane bench`: the commands around executor.bench."""

import typer

from executor.cli import bench_decode, bench_overhead

app = typer.Typer(help="Measure speclane on this machine.", no_args_is_help=False)
app.command("decode")(bench_decode.decode)
app.command("overhead")(bench_overhead.overhead)
