"""`speclane generate`: prompts in, answers out."""

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.cli import options as o
from executor.cli.groups import ModelOptions, RecoveryOptions, SamplingOptions, grouped
from executor.cli.output import log_to_stderr, note, progress_shown, write_json
from executor.errors import InvalidRequest

if TYPE_CHECKING:
    from executor.cli.report import Batch, Run
    from executor.cli.screen import Screen
    from executor.llm import LLM
    from executor.sampling import SamplingParams

_EXAMPLE = "--prompt 'Why is the sky blue?'"
_SHOWN = 72
"""Characters of a prompt that are shown above its answer."""


@grouped
def generate(
    *,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="The user's message; repeatable, several run together.",
            metavar="TEXT",
            show_default="read from stdin",
        ),
    ] = None,
    prompts: Annotated[
        str | None,
        typer.Option(help="More of them: JSON lines with question_id, category, turns.", metavar="FILE"),
    ] = None,
    system: o.System = None,
    raw: o.Raw = False,
    model: ModelOptions,
    recovery: RecoveryOptions,
    sampling: SamplingOptions,
    as_json: o.Json = False,
    verbose: o.Verbose = False,
) -> None:
    """Answer prompts. Answers go to stdout as they come, in the order of prompts, all else to stderr."""
    log_to_stderr(verbose=verbose)
    _refuse_contradictions(raw, system, sampling, as_json)
    params = sampling.params()
    texts = _prompts(prompt, prompts)
    config = model.config(recovery=recovery.recovery(), max_sequences=1 if len(texts) == 1 else None)

    from executor.cli import report
    from executor.cli.lane_view import LaneView
    from executor.cli.screen import Screen
    from executor.llm import LLM

    with progress_shown():
        llm = LLM(config)
    encoded = [_encode(llm, text, params, raw, system) for text in texts]
    view = LaneView(llm)
    with Screen(view, shows_text=not as_json) as screen, llm:
        if not (as_json or sys.stderr.isatty()):
            note(_serving(llm))
        done: Run | Batch
        if len(encoded) == 1:
            done = _run(llm, encoded[0], params, view, screen, not as_json)
        else:
            done = _run_together(llm, encoded, params, view, screen, None if as_json else texts)
    if as_json:
        write_json(report.as_dict(done, config))
    else:
        report.show(done)


def _refuse_contradictions(raw: bool, system: str | None, sampling: SamplingOptions, as_json: bool) -> None:
    if raw and system is not None:
        raise InvalidRequest("system", "--system contradicts --raw; leave one of them out")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None and not as_json:
            raise InvalidRequest(name, f"--{name.replace('_', '-')} are only in the JSON output; add --json")


def _prompts(given: list[str] | None, file: str | None) -> list[str]:
    """Those of the command line, then those of the file; that on stdin if there are none."""
    texts = [_checked(o.valid_text("prompt", text)) for text in given or ()]
    if file is not None:
        from executor.bench.prompts import read_prompts
        from executor.config import local_path

        texts += [prompt.text for prompt in read_prompts(local_path("prompts", file, "prompts.jsonl"))]
    return texts or [_from_stdin()]


def _from_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise InvalidRequest(
            "prompt", f"--prompt is missing, and stdin is a terminal or closed; try {_EXAMPLE}"
        )
    else:
        try:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError:
            raise InvalidRequest(
                "prompt", f"the prompt on stdin is not valid UTF-8; try {_EXAMPLE}"
            ) from None
    return _checked(text)


def _checked(text: str) -> str:
    if not text:
        raise InvalidRequest("prompt", f"the prompt is empty; try {_EXAMPLE}")
    return text


def _encode(llm: "LLM", text: str, params: "SamplingParams", raw: bool, system: str | None) -> list[int]:
    if raw:
        return llm.encode(text, params)
    messages = [{"role": "system", "content": o.valid_text("system", system)}] if system else []
    return llm.encode_chat([*messages, {"role": "user", "content": text}], params)


def _serving(llm: "LLM") -> str:
    config = llm.config
    target = f"target {config.target} ({config.engine}, {config.dtype})"
    speculator = f"speculator {config.speculator}, K={config.num_speculative_tokens}"
    return f"serving: {target}, {speculator if config.speculates else 'no speculator'}"


def _run(
    llm: "LLM", tokens: list[int], params: "SamplingParams", lanes: Any, screen: "Screen", shows_text: bool
) -> "Run":
    from executor.cli.report import Run

    lanes.begin()
    began = time.perf_counter()
    first = None
    stream = llm.stream(tokens, params)
    for delta in stream:
        if first is None:
            first = time.perf_counter() - began
        if shows_text:
            screen.text(delta.text)
    seconds = time.perf_counter() - began
    lanes.end()
    stats = llm.coordinator.stats
    stale, transport = llm.coordinator.stale, llm.coordinator.transport
    return Run(stream.completion, seconds, first or seconds, lanes.as_dicts(), stats, stale, transport)


def _run_together(
    llm: "LLM",
    encoded: list[list[int]],
    params: "SamplingParams",
    lanes: Any,
    screen: "Screen",
    texts: list[str] | None,
) -> "Batch":
    """Answers are shown one after the other, under the prompts `texts`, while they are made at once."""
    from executor.cli.report import Batch

    lanes.begin()
    began = time.perf_counter()
    streams = [llm.stream(tokens, params) for tokens in encoded]
    try:
        for i, stream in enumerate(streams):
            if texts is not None:
                screen.text(("\n\n" if i else "") + f"--- {i + 1}: {_first_line(texts[i])}\n")
            for delta in stream:
                if texts is not None:
                    screen.text(delta.text)
    finally:
        for stream in streams:
            stream.close()
    seconds = time.perf_counter() - began
    lanes.end()
    completions = [stream.completion for stream in streams]
    stats, stale, transport = llm.coordinator.stats, llm.coordinator.stale, llm.coordinator.transport
    return Batch(completions, seconds, lanes.as_dicts(), stats, stale, transport)


def _first_line(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _SHOWN else f"{line[: _SHOWN - 1]}…"
