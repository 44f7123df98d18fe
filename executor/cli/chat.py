"""`speclane chat`: a conversation in the terminal, through the model's own template."""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from executor.cli import options as o
from executor.cli.groups import ModelOptions, SamplingOptions, grouped
from executor.cli.output import log_to_stderr, note, progress_shown
from executor.errors import InvalidRequest

if TYPE_CHECKING:
    from executor.cli.lane_view import LaneView
    from executor.llm import LLM
    from executor.sampling import SamplingParams

_HELP = "/new begins again, /quit ends; so does Ctrl-D"


@dataclass(frozen=True, kw_only=True)
class _Sampling(SamplingOptions):
    max_tokens: o.MaxTokens = 512
    temperature: o.Temperature = 0.7
    logprobs: None = field(init=False, default=None)
    prompt_logprobs: None = field(init=False, default=None)


@grouped
def chat(
    *,
    system: o.System = None,
    model: ModelOptions,
    sampling: _Sampling,
    verbose: o.Verbose = False,
) -> None:
    """Talk with a model. Each line is a message; answers come as they are generated."""
    log_to_stderr(verbose=verbose)
    params = sampling.params()
    made = model.config(max_sequences=1)

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
