"""Options that commands share, and what they make: a Config and SamplingParams.

A value that was not given is None, and then the executor's own default holds. What a value may be is the
executor's to say. Options of drafting mean nothing with `--speculator off`, but they are no error: a script
may try several speculators with the same others.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from executor.cli.config_file import read_config_file
from executor.cli.speculative_config import speculative_config
from executor.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from executor.config import Config
    from executor.grammar import Grammar
    from executor.sampling import SamplingParams


def _option(panel: str, metavar: str, text: str, default: str | None = None) -> Any:
    """`default`: what holds if the option is not given; None shows the parameter's own, if it has one."""
    shown = True if default is None else default
    return typer.Option(help=text, metavar=metavar, show_default=shown, rich_help_panel=panel)


def _model(metavar: str, text: str, default: str | None = None) -> Any:
    return _option("Model", metavar, text, default)


def _timeout(text: str, default: str) -> Any:
    return _option("Timeouts", "SECONDS", text, default)


def _sampling(metavar: str, text: str, default: str | None = None) -> Any:
    return _option("Sampling", metavar, text, default)


def _flag(panel: str, name: str, text: str) -> Any:
    return typer.Option(name, help=text, rich_help_panel=panel)


Target = Annotated[str | None, _model("MODEL", "Alias, checkpoint directory or hub id.", "smollm2-135m")]
Speculator = Annotated[
    str,
    _model(
        "off|ngram|suffix|eagle|cascade|MODEL",
        "What drafts: nothing, lookups, a head, both, or a small model.",
    ),
]
NumSpeculativeTokens = Annotated[int | None, _model("K", "Longest draft in tokens, from 1 to 32.", "5")]
Engine = Annotated[str, _model("native|hf|toy", "Code that runs the models.")]
Dtype = Annotated[str, _model("fp32|bf16|fp16", "Type of weights and arithmetic.")]
Device = Annotated[str, _model("DEVICE", "auto, cpu, cuda or cuda:N, for both lanes.")]
Lanes = Annotated[
    str,
    _model("process|inline", "Each lane in a process of its own, or all in this one, for debuggers."),
]
TargetRanks = Annotated[
    int | None,
    _model("N", "Processes that share the target model, each with a part of it: tensor parallelism.", "1"),
]
MaxModelLen = Annotated[
    int | None, _model("N", "Longest sequence in tokens, prompt included.", "the target's")
]
MemoryBudget = Annotated[
    str | None,
    _model(
        "SIZE", "What the lanes may take of each device, such as 4GB or 512MiB.", "nine tenths of the free"
    ),
]
KvTokens = Annotated[
    int | None, _model("N", "Tokens that each lane's KV holds at most.", "all that are of use and fit")
]
MaxVerifyTokens = Annotated[
    int | None, _model("N", "Tokens that one verification of all sequences takes.", "one pass of the target")
]
Threads = Annotated[int | None, _model("N", "CPU threads of each lane.", "all cores")]
CacheDir = Annotated[
    str | None, _model("DIRECTORY", "Where fetched models are kept.", "$SPECLANE_CACHE, else ~/.cache")
]
LoadTimeout = Annotated[float | None, _timeout("Time until both lanes must serve.", "600")]
DraftTimeout = Annotated[
    float | None, _timeout("After so long at most the target goes on without a draft.", "10")
]
HangTimeout = Annotated[
    float | None,
    _timeout("After so long without an answer a speculator is ended; at least --draft-timeout.", "30"),
]
VerifyTimeout = Annotated[float | None, _timeout("After so long the target counts as failed.", "120")]
StopTimeout = Annotated[float | None, _timeout("After so long a lane that was told to stop is killed.", "3")]

MaxSequences = Annotated[int | None, _model("N", "Sequences that run at once; more wait.", "8")]
SpeculativeConfig = Annotated[
    str | None,
    _model("JSON", "vLLM's --speculative-config: method, model, num_speculative_tokens …", "none"),
]
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="TOML file of options, as they are called here; those on the command line win.",
        metavar="FILE",
        callback=read_config_file,
        is_eager=True,
        show_default=False,
    ),
]

Standby = Annotated[
    list[str] | None,
    _option("Recovery", "target|speculator", "Keep a spare process of this lane loaded; repeatable."),
]
Group = Annotated[
    str | None,
    _option(
        "Recovery",
        "separate|one_for_all",
        "Whether lanes start again each for itself, or all when one dies, as they must on one GPU under MPS.",
        "separate",
    ),
]

MaxTokens = Annotated[int, _sampling("N", "Generate at most so many tokens.")]
Temperature = Annotated[float, _sampling("T", "0 is greedy.")]
TopP = Annotated[float | None, _sampling("P", "Keep the most probable tokens of this mass.")]
TopK = Annotated[int | None, _sampling("K", "Keep the K most probable tokens.")]
MinP = Annotated[float | None, _sampling("P", "Keep tokens with this share of the best one's probability.")]
Seed = Annotated[
    int | None, _sampling("S", "Same seed, same text, for the same model, prompt and sampling.", "drawn")
]
MinTokens = Annotated[int | None, _sampling("N", "No stop before so many tokens.")]
Stop = Annotated[list[str] | None, _sampling("TEXT", "End the text at this string; repeatable.")]
StopTokenId = Annotated[list[int] | None, _sampling("ID", "End the text at this token; repeatable.")]
IgnoreEos = Annotated[bool, _flag("Sampling", "--ignore-eos", "Go on after end-of-text.")]
Logprobs = Annotated[
    int | None, _sampling("N", "With --json: log-probability of each token and of N alternatives.")
]

PresencePenalty = Annotated[
    float | None, _sampling("P", "Taken from the logit of each token that was generated; -2 to 2.", "0")
]
FrequencyPenalty = Annotated[float | None, _sampling("P", "The same, each time that it was generated.", "0")]
RepetitionPenalty = Annotated[
    float | None, _sampling("P", "Divides the logits of tokens in prompt and text.", "1")
]
BadWord = Annotated[list[str] | None, _sampling("TEXT", "Never generate this; repeatable.")]
JsonSchema = Annotated[
    str | None, _sampling("FILE", "The answer is JSON of the JSON Schema in this file; - is any JSON object.")
]
Regex = Annotated[str | None, _sampling("REGEX", "The answer matches this regular expression.")]
Choice = Annotated[list[str] | None, _sampling("TEXT", "The answer is one of these; repeatable.")]

Raw = Annotated[bool, _flag("Prompt", "--raw", "Send the prompt as it is, without the chat template.")]
System = Annotated[str | None, _option("Prompt", "TEXT", "System message of the chat.")]
Pid = Annotated[
    int | None, typer.Option(help="Which executor.", metavar="PID", show_default="the one that is running")
]
Json = Annotated[bool, _flag("Output", "--json", "Write one JSON object to stdout.")]
Verbose = Annotated[bool, _flag("Output", "--verbose", "Log each lane's phases and notes to stderr.")]

_CONFIG = (
    *("target", "speculator", "engine", "dtype", "device", "lanes", "target_ranks"),
    *("num_speculative_tokens", "max_model_len", "max_sequences", "kv_tokens", "max_verify_tokens"),
    "threads",
)
_TIMEOUTS = {name: f"{name}_timeout" for name in ("load", "draft", "verify", "hang", "stop")}
_PARAMS = (
    *("max_tokens", "min_tokens", "ignore_eos", "logprobs", "seed"),
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


def config(given: Mapping[str, Any], **fixed: Any) -> "Config":
    """The Config of a command's options, by the names of their parameters. Raises InvalidConfig."""
    from executor.config import Config, Recovery, Timeouts

    chosen = {name: given[name] for name in _CONFIG if given.get(name) is not None}
    if given.get("cache_dir") is not None:
        chosen["cache_dir"] = given["cache_dir"]
    if given.get("memory_budget") is not None:
        chosen["memory_budget"] = nbytes("memory_budget", given["memory_budget"])
    timeouts = {name: given[key] for name, key in _TIMEOUTS.items() if given.get(key) is not None}
    if given.get("standby") or given.get("group"):
        fixed["recovery"] = Recovery(
            standby=tuple(given.get("standby") or ()), group=given.get("group") or "separate"
        )
    if given.get("speculative_config") is not None:
        chosen |= speculative_config(given["speculative_config"])
    made = Config(**(chosen | fixed), timeouts=Timeouts(**timeouts))
    if given.get("target") == "":  # as good as none to Config, but an empty variable to a script
        raise InvalidConfig("target", f"target must not be empty; try {made.target}")
    return made


def sampling(given: Mapping[str, Any]) -> "SamplingParams":
    """The SamplingParams of a command's options. Raises InvalidRequest."""
    from executor.sampling import SamplingParams

    chosen = {name: given[name] for name in _PARAMS if given.get(name) is not None}
    return SamplingParams(
        **chosen,
        stop=tuple(valid_text("stop", text) for text in given.get("stop") or ()),
        stop_token_ids=tuple(given.get("stop_token_id") or ()),
        bad_words=tuple(valid_text("bad_word", text) for text in given.get("bad_word") or ()),
        grammar=_grammar(given),
    )


def _grammar(given: Mapping[str, Any]) -> "Grammar | None":
    """Of the one option that asks for a form. Raises InvalidRequest."""
    asked = [name for name in ("json_schema", "regex", "choice") if given.get(name)]
    if not asked:
        return None
    if len(asked) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in asked[:2])
        raise InvalidRequest(asked[1], f"{second} contradicts {first}; leave one of them out")
    from executor.grammar import Grammar

    (name,) = asked
    try:
        if name == "regex":
            return Grammar("regex", valid_text("regex", given["regex"]))
        if name == "choice":
            return Grammar("choice", [valid_text("choice", text) for text in given["choice"]])
        if given["json_schema"] == "-":
            return Grammar("json_object")
        return Grammar("json_schema", _schema(given["json_schema"]))
    except InvalidRequest as error:
        raise InvalidRequest(name, str(error)) from None


def _schema(file: str) -> str:
    from executor.config import local_path

    try:
        return local_path("json_schema", file, "schema.json").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise InvalidRequest(
            "json_schema",
            f"--json-schema {file}: {reason}; try a file with a JSON Schema, or - for any object",
        ) from None


def valid_text(name: str, text: str) -> str:
    """Text from the command line, which may hold bytes that are none. Raises InvalidRequest."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, f"--{name} is not valid UTF-8; try plain text") from None
    return text


def nbytes(name: str, text: str) -> int:
    """A size from the command line. Raises InvalidConfig."""
    from executor.sizes import parse_size

    try:
        return parse_size(text)
    except ValueError as error:
        raise InvalidConfig(name, f"--{name.replace('_', '-')} {error}") from None


def whole(name: str, value: int, low: int, high: int, works: int) -> None:
    """Raises InvalidConfig for a number out of bounds."""
    if not low <= value <= high:
        option = "--" + name.replace("_", "-")
        raise InvalidConfig(name, f"{option} must be from {low} to {high}, got {value}; try {works}")
