"""`speclane speculator`: one speculator for several executors, on this host or others."""

import signal
from typing import TYPE_CHECKING, Annotated

import typer

from executor.cli import options as o
from executor.cli import quitting
from executor.cli.output import log, log_to_stderr, write
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from types import FrameType

_CLIENTS = 4
_MOST_CLIENTS = 256


def speculator_server(
    ctx: typer.Context,
    config: o.ConfigFile = None,
    bind: Annotated[
        str, typer.Option(help="Where to serve: ipc:///path or tcp://HOST:PORT; port 0 is any that is free.")
    ] = "",
    keys: o.Keys = None,
    clients: Annotated[
        int, typer.Option(help="Executors that may attach at once; each has an equal share.", metavar="N")
    ] = _CLIENTS,
    speculator: o.Speculator = "auto",
    target: Annotated[
        str | None,
        typer.Option(
            help="Whose head it is, for eagle and cascade.", metavar="MODEL", show_default="smollm2-135m"
        ),
    ] = None,
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    engine: o.Engine = "native",
    dtype: o.Dtype = "bf16",
    device: o.Device = "auto",
    max_model_len: o.MaxModelLen = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(help="Sequences of each client that it drafts for.", metavar="N", show_default="8"),
    ] = None,
    memory_budget: o.MemoryBudget = None,
    kv_tokens: o.KvTokens = None,
    threads: o.Threads = None,
    cache_dir: o.CacheDir = None,
    load_timeout: o.LoadTimeout = None,
    hang_timeout: o.HangTimeout = None,
    stop_timeout: o.StopTimeout = None,
    standby: o.Standby = None,
    verbose: o.Verbose = False,
) -> None:
    """Serve a speculator to the executors that attach by --speculator ADDRESS, until SIGTERM or Ctrl-C.

    Once it serves it says where, in one line on stdout.
    """
    log_to_stderr(verbose=verbose)
    if not bind:
        raise InvalidConfig("bind", "--bind is missing; try --bind tcp://127.0.0.1:7000")
    o.whole("clients", clients, 1, _MOST_CLIENTS, _CLIENTS)

    from executor.pool.opening import opened

    made = o.config(ctx.params)
    with opened(made, bind, clients, log.info) as (server, door):
        served = server.offer.name

        def stop(_number: int, _frame: "FrameType | None") -> None:
            server.stop()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        try:
            server.serve(lambda: write(f"serving {served} on {door.address}\n"))
        finally:
            quitting.on_signals()
