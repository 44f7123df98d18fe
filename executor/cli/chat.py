"""`speclane chat`: a conversation in the terminal, through the model's own template."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.output import log_to_stderr, note, progress_shown
from executor.errors import InvalidRequest

if TYPE_CHECKING:
    from executor.cli.lane_view import LaneView
    from executor.llm import LLM
    from executor.sampling import SamplingParams

_HELP = "/new begins again, /quit ends; so does Ctrl-D"


def chat(
    ctx: typer.Context,
    config: o.ConfigFile = None,
    system: o.System = None,
    target: o.Target = None,
    speculator: o.Speculator = "auto",
    num_speculative_tokens: o.NumSpeculativeTokens = None,
    speculative_config: o.SpeculativeConfig = None,
    engine: o.Engine = "native",
    dtype: o.Dtype = "bf16",
    device: o.Device = "auto",
    target_ranks: o.TargetRanks = None,
    max_model_len: o.MaxModelLen = None,
    memory_budget: o.MemoryBudget = None,
    threads: o.Threads = None,
    cache_dir: o.CacheDir = None,
    max_tokens: Annotated[int, typer.Option(help="Of each answer.", metavar="N")] = 512,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", metavar="T")] = 0.7,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    verbose: o.Verbose = False,
) -> None:
    """Talk with a model. Each line is a message; answers come as they are generated."""
    log_to_stderr(verbose=verbose)
    params = o.sampling(ctx.params)
    made = o.config(ctx.params, max_sequences=1)

    from executor.cli.lane_view import LaneView
    from executor.cli.screen import Screen
    from executor.llm import LLM

    with progress_shown():
        llm = LLM(made)
    lanes = LaneView(llm)
    with Screen(lanes, shows_text=False):
        llm.start()
    with llm:
        if sys.stdin.isatty():
            note(_HELP)
        _converse(llm, lanes, params, o.valid_text("system", system) if system else None)


def _converse(llm: "LLM", lanes: "LaneView", params: "SamplingParams", system: str | None) -> None:
    begin = [{"role": "system", "content": system}] if system else []
    messages: list[dict[str, Any]] = list(begin)
    while (line := _line()) is not None:
        if line in ("/quit", "/exit"):
            return
        if line == "/new":
            messages = list(begin)
        elif line.startswith("/"):
            note(_HELP)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                answer = _answer(llm, lanes, params, messages)
            except InvalidRequest as error:  # as a rule: the conversation has filled the context
                note(f"error: {error}; or /new")
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _line() -> str | None:
    """What is said next; None at the end."""
    try:
        if sys.stdin.isatty():
            import readline  # noqa: F401  gives `input` its editing and history

            return input("> ").strip()
        line = sys.stdin.readline()
        return line.strip() if line else None
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise InvalidRequest("prompt", "the message on stdin is not valid UTF-8; try plain text") from None


def _answer(llm: "LLM", lanes: "LaneView", params: "SamplingParams", messages: list[dict[str, Any]]) -> str:
    from executor.cli.screen import Screen

    tokens = llm.encode_chat(messages, params)
    lanes.begin()
    with Screen(lanes, shows_text=True) as screen:
        stream = llm.stream(tokens, params)
        for delta in stream:
            screen.text(delta.text)
    lanes.end()
    return stream.completion.text
