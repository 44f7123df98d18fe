"""`speclane bench`: the commands around executor.bench."""

import typer

from executor.cli import (
    bench_decode,
    bench_distance,
    bench_handoff,
    bench_http,
    bench_invariance,
    bench_memory,
    bench_overhead,
    bench_pool,
    bench_recovery,
    bench_simulate,
)

app = typer.Typer(help="Measure speclane on this machine.")
app.command("decode")(bench_decode.decode)
app.command("overhead")(bench_overhead.overhead)
app.command("invariance")(bench_invariance.invariance)
app.command("recovery")(bench_recovery.recovery)
app.command("memory")(bench_memory.memory)
app.command("simulate")(bench_simulate.simulate)
app.command("pool")(bench_pool.pool)
app.command("distance")(bench_distance.distance)
app.command("http")(bench_http.http)
app.command("handoff")(bench_handoff.handoff)
