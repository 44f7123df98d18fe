"""`speclane speculator`: one speculator for several executors, on this host or others."""

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from executor.cli import options as o
from executor.cli import quitting
from executor.cli.groups import ModelOptions, RecoveryOptions, grouped
from executor.cli.output import log, log_to_stderr, write
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from types import FrameType

_CLIENTS = 4
_MOST_CLIENTS = 256


@dataclass(frozen=True, kw_only=True)
class SpeculatorOptions(ModelOptions):
    """Without what concerns a target lane or its rounds; `target` is whose head is served."""

    lanes: str = field(init=False, default="process")
    mode: str = field(init=False, default="sequential")
    hypotheses: None = field(init=False, default=None)
    ubatches: None = field(init=False, default=None)
    trace: None = field(init=False, default=None)
    target_ranks: None = field(init=False, default=None)
    transport: str = field(init=False, default="auto")
    require_cuda_ipc: bool = field(init=False, default=False)

    target_device: None = field(init=False, default=None)
    target_env: None = field(init=False, default=None)
    target_cores: None = field(init=False, default=None)
    speculative_config: None = field(init=False, default=None)
    attach: str = field(init=False, default="now")
    max_verify_tokens: None = field(init=False, default=None)
    draft_timeout: None = field(init=False, default=None)
    verify_timeout: None = field(init=False, default=None)


@grouped
def speculator_server(
    *,
    bind: Annotated[
        str,
        typer.Option(
            help="Where to serve: ipc:///path or tcp://HOST:PORT; port 0 is any that is free.",
            metavar="ADDRESS",
        ),
    ] = "",
    clients: Annotated[
        int, typer.Option(help="Executors that may attach at once; each has an equal share.", metavar="N")
    ] = _CLIENTS,
    model: SpeculatorOptions,
    recovery: RecoveryOptions,
    max_sequences: Annotated[
        int | None,
        typer.Option(help="Sequences of each client that it drafts for.", metavar="N", show_default="8"),
    ] = None,
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

    config = model.config(recovery=recovery.recovery(), max_sequences=max_sequences)
    with opened(config, bind, clients, log.info) as (server, door):
        served = server.offer.name

        def stop(_number: int, _frame: "FrameType | None") -> None:
            server.stop()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, stop)
        try:
            server.serve(lambda: write(f"serving {served} on {door.address}\n"))
        finally:
            quitting.on_signals()
