"""`speclane serve`: an OpenAI-compatible HTTP server."""

import os
from typing import Annotated

import typer

from executor.cli import options as o
from executor.cli import quitting
from executor.cli.groups import ModelOptions, RecoveryOptions, grouped
from executor.cli.output import log_to_stderr, note, progress_shown
from executor.errors import SpeclaneError

_KEY_VARIABLE = "SPECLANE_API_KEY"


def _server(metavar: str, text: str, default: str | None = None) -> typer.models.OptionInfo:
    shown = True if default is None else default
    option: typer.models.OptionInfo = typer.Option(
        help=text, metavar=metavar, show_default=shown, rich_help_panel="Server"
    )
    return option


@grouped
def serve(
    *,
    host: Annotated[str, _server("HOST", "Address to listen on; 0.0.0.0 is all.")] = "127.0.0.1",
    port: Annotated[int, _server("PORT", "Port to listen on; 0 is any that is free.")] = 8000,
    api_key: Annotated[
        str | None,
        _server("KEY", "What clients must send as bearer token.", f"${_KEY_VARIABLE}, or none"),
    ] = None,
    served_model_name: Annotated[
        str | None, _server("NAME", "How clients call the model.", "as --target")
    ] = None,
    max_body: Annotated[str, _server("SIZE", "Longest body of a request.")] = "8MiB",
    max_queue: Annotated[int, _server("N", "Sequences that may wait; more are told 429.")] = 256,
    request_timeout: Annotated[
        float | None, _server("SECONDS", "An answer that takes longer is ended with 504.", "none")
    ] = None,
    shutdown_timeout: Annotated[
        float, _server("SECONDS", "After SIGTERM, answers under way may go on for so long.")
    ] = 30.0,
    otlp_endpoint: Annotated[
        str | None, _server("URL", "OpenTelemetry collector that gets a span per answer.", "none")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, _server("ORIGIN", "Let pages of this origin call; repeatable.", "none")
    ] = None,
    model: ModelOptions,
    recovery: RecoveryOptions,
    max_sequences: o.MaxSequences = None,
    verbose: o.Verbose = False,
) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM or Ctrl-C, then let answers under way end."""
    log_to_stderr(verbose=verbose)

    from executor.cli.lane_view import LaneView
    from executor.cli.screen import Screen
    from executor.llm import LLM
    from executor.server.options import ServerOptions
    from executor.server.serving import Server, bind, url_of

    made = model.config(recovery=recovery.recovery(), max_sequences=max_sequences)
    options = ServerOptions(
        host=host,
        port=port,
        api_key=os.environ.get(_KEY_VARIABLE) or None if api_key is None else api_key,
        model_name=served_model_name,
        max_body=o.nbytes("max_body", max_body),
        max_queue=max_queue,
        request_timeout=request_timeout,
        shutdown_timeout=shutdown_timeout,
        cors_origins=tuple(cors_origin or ()),
        otlp_endpoint=otlp_endpoint,
    )
    bound = bind(options)  # an address that is taken is no reason to load a model first
    with progress_shown():
        llm = LLM(made)
    with Screen(LaneView(llm), shows_text=False):
        llm.start()
    with llm:
        told = f"serving {options.model_name or made.target} on {url_of(bound)}"
        cut_off = Server(llm, options, bound, lambda: note(told)).run()
        quitting.on_signals()
    if cut_off:
        raise SpeclaneError(f"{cut_off} answers were cut off after {shutdown_timeout:g} s")
