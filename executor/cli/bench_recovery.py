"""`speclane bench recovery`: what the death or replacement of a lane costs a client."""

from typing import Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ProcessOptions, RecoveryOptions, grouped
from executor.cli.output import log, log_to_stderr, note, progress_shown, write_json
from executor.errors import InvalidConfig

_TIMES = 10
_NEW_TOKENS = 1000


@grouped
def recovery(
    *,
    times: Annotated[int, typer.Option(help="How often each thing happens.", metavar="N")] = _TIMES,
    new_tokens: Annotated[int, typer.Option(help="Tokens of a stream.", metavar="N")] = _NEW_TOKENS,
    prompt: Annotated[str, typer.Option(help="What is asked.", metavar="TEXT")] = "Count to one thousand.",
    model: ProcessOptions,
    deaths: RecoveryOptions,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Gaps in a stream while lanes are killed, stopped and swapped, and how soon drafts are back."""
    log_to_stderr(verbose=verbose)
    if not verbose:
        log.setLevel("CRITICAL")  # the deaths are meant
    o.whole("times", times, 1, 10_000, _TIMES)
    o.whole("new_tokens", new_tokens, 32, 1 << 20, _NEW_TOKENS)
    if model.speculator == "off":
        raise InvalidConfig("speculator", "--speculator off leaves nothing to measure; try ngram")
    from executor.bench.recovery import Plan, measure
    from executor.llm import LLM

    config = model.config(recovery=deaths.recovery())
    plan = Plan(config=config, prompt=o.valid_text("prompt", prompt), times=times, new_tokens=new_tokens)
    with progress_shown():
        LLM(config).encode(plan.prompt, plan.params)  # refused here, not after minutes
    result = measure(plan, note)
    if as_json:
        write_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"plain step {result['plain_step_ms']:.2f} ms; each {result['times']} times: p50, p99, longest"
    caption = f"speed without the speculator: {result['degraded_share']:.1%} of one never had"
    columns = {
        "gap in steps": "gap_steps",
        "back after s": "back_seconds",
        "beyond load s": "back_beyond_load_seconds",
        "its memory unmapped after ms": "unmapped_ms",
        "ended after ms": "ended_ms",
    }
    table = Table("what", *columns, title=title, caption=caption, box=None)
    for name, row in result.items():
        if isinstance(row, dict):
            cells = map(row.get, columns.values())
            table.add_row(name.replace("_", " "), *(_three(cell) if cell else "-" for cell in cells))
    Console().print(table)


def _three(percentiles: dict[str, float]) -> str:
    return " ".join(f"{value:.2f}" for value in percentiles.values())
