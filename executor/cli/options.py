"""Options that commands share, and what they make: a Config and SamplingParams.

A value that was not given is None, and then the executor's own default holds. What a value may be is the
executor's to say; here only contradictions between options are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from executor.config import Config
    from executor.sampling import SamplingParams

_MODEL = "Model"
_SAMPLING = "Sampling"
_OUTPUT = "Output"


def _option(panel: str, help_text: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(*names, help=help_text, metavar=metavar, rich_help_panel=panel, show_default=True)


Target = Annotated[
    str | None,
    _option(
        _MODEL, "Target model: an alias, a checkpoint directory or a hub id. [default: smollm2-135m]", "MODEL"
    ),
]
Speculator = Annotated[
    str,
    _option(_MODEL, "What drafts: off, ngram (prompt lookup), or a draft model as above.", "off|ngram|MODEL"),
]
NumSpeculativeTokens = Annotated[int | None, _option(_MODEL, "Longest draft, K. [default: 5]", "K")]
Engine = Annotated[str, _option(_MODEL, "Code that runs the models.", "native|hf|toy")]
Dtype = Annotated[str, _option(_MODEL, "Type of weights and arithmetic.", "fp32|bf16|fp16")]
Device = Annotated[str, _option(_MODEL, "auto, cpu, cuda or cuda:N, for both lanes.", "DEVICE")]
MaxModelLen = Annotated[
    int | None, _option(_MODEL, "Longest sequence in tokens, prompt included. [default: the target's]", "N")
]
Threads = Annotated[int | None, _option(_MODEL, "CPU threads of each lane. [default: all cores]", "N")]
CacheDir = Annotated[
    str | None,
    _option(_MODEL, "Where fetched models are kept. [default: $SPECLANE_CACHE or ~/.cache]", "DIRECTORY"),
]
LoadTimeout = Annotated[
    float | None, _option(_MODEL, "Seconds until both lanes must serve. [default: 600]", "S")
]
DraftTimeout = Annotated[
    float | None,
    _option(_MODEL, "Seconds after which the target goes on without a draft. [default: 10]", "S"),
]
VerifyTimeout = Annotated[
    float | None, _option(_MODEL, "Seconds after which the target counts as failed. [default: 120]", "S")
]

MaxTokens = Annotated[int, _option(_SAMPLING, "Generate at most so many tokens.", "N")]
Temperature = Annotated[float, _option(_SAMPLING, "0 is greedy.", "T")]
TopP = Annotated[float | None, _option(_SAMPLING, "Keep the most probable tokens of this mass.", "P")]
TopK = Annotated[int | None, _option(_SAMPLING, "Keep the K most probable tokens.", "K")]
MinP = Annotated[
    float | None, _option(_SAMPLING, "Keep tokens of this share of the best one's probability.", "P")
]
Seed = Annotated[int | None, _option(_SAMPLING, "Same seed, same text. [default: drawn]", "S")]
MinTokens = Annotated[int | None, _option(_SAMPLING, "No stop before so many tokens.", "N")]
Stop = Annotated[list[str] | None, _option(_SAMPLING, "End the text at this string; repeatable.", "TEXT")]
StopTokenId = Annotated[list[int] | None, _option(_SAMPLING, "End the text at this token; repeatable.", "ID")]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after end-of-text.", rich_help_panel=_SAMPLING)
]
Logprobs = Annotated[
    int | None, _option(_SAMPLING, "With --json: log-probability of each token and N alternatives.", "N")
]

Raw = Annotated[bool, typer.Option("--raw", help="Send the prompt as it is, without the chat template.")]
System = Annotated[str | None, typer.Option(help="System message of the chat.", metavar="TEXT")]
Json = Annotated[
    bool, typer.Option("--json", help="Write one JSON object to stdout.", rich_help_panel=_OUTPUT)
]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", help="Log each lane's phases and notes to stderr.", rich_help_panel=_OUTPUT),
]

_CONFIG = (
    "target",
    "speculator",
    "engine",
    "dtype",
    "device",
    "num_speculative_tokens",
    "max_model_len",
    "threads",
)
_TIMEOUTS = ("load", "draft", "verify")
_DRAFTING = ("num_speculative_tokens", "draft_timeout")


def config(given: Mapping[str, Any], **fixed: Any) -> "Config":
    """The Config of a command's options, by the names of their parameters. Raises InvalidConfig."""
    from executor.config import Config, Timeouts

    if given["speculator"] == "off":
        for name in _DRAFTING:
            if given.get(name) is not None:
                option = "--" + name.replace("_", "-")
                raise InvalidConfig(
                    name, f"{option} contradicts --speculator off; leave it out or use --speculator ngram"
                )
    chosen = {name: given[name] for name in _CONFIG if given.get(name) is not None}
    if given.get("target") == "":
        raise InvalidConfig("target", "target must not be empty; try smollm2-135m")
    if given.get("cache_dir") is not None:
        chosen["cache_dir"] = Path(given["cache_dir"])
    timeouts = {
        name: given[f"{name}_timeout"] for name in _TIMEOUTS if given.get(f"{name}_timeout") is not None
    }
    return Config(**chosen, timeouts=Timeouts(**timeouts), **fixed)


_PARAMS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "ignore_eos",
    "logprobs",
)


def sampling(given: Mapping[str, Any]) -> "SamplingParams":
    """The SamplingParams of a command's options. Raises InvalidRequest."""
    from executor.sampling import SamplingParams

    chosen = {name: given[name] for name in _PARAMS if given.get(name) is not None}
    stops = tuple(valid_text("stop", text) for text in given.get("stop") or ())
    return SamplingParams(**chosen, stop=stops, stop_token_ids=tuple(given.get("stop_token_id") or ()))


def valid_text(name: str, text: str) -> str:
    """Text from the command line, which may hold bytes that are none. Raises InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, f"--{name} is not valid UTF-8; try plain text") from None
    return text
