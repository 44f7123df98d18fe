"""Options that commands share, one by one, and how values of the command line are read; see groups."""

from typing import Annotated, Any

import typer

from executor.cli.config_file import read_config_file
from executor.errors import InvalidConfig, InvalidRequest


def _option(panel: str, metavar: str, text: str, default: str | None = None) -> Any:
    """`default`: what holds if the option is not given; None shows the parameter's own, if it has one."""
    shown = True if default is None else default
    return typer.Option(help=text, metavar=metavar, show_default=shown, rich_help_panel=panel)


def _model(metavar: str, text: str, default: str | None = None) -> Any:
    return _option("Model", metavar, text, default)


def _lane(metavar: str, text: str, default: str | None = None) -> Any:
    return _option("Each lane", metavar, text, default)


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
        "off|ngram|suffix|eagle|cascade|MODEL|ADDRESS",
        "What drafts: nothing, lookups, a head, both, a small model; or servers, by ipc:// or tcp://.",
    ),
]
NumSpeculativeTokens = Annotated[int | None, _model("K", "Longest draft in tokens, from 1 to 32.", "5")]
Mode = Annotated[
    str,
    _model(
        "sequential|ahead|outcomes|auto",
        "Draft, then verify; or meanwhile draft for the likeliest verdict, for many, or what pays most.",
    ),
]
Hypotheses = Annotated[
    int | None,
    _model("N", "Verdicts for which drafts are prepared, from 0 to 64.", "by mode: 0, 1, 2 (K + 1)"),
]
Ubatches = Annotated[
    int | None, _model("1|2", "Parts in which sequences are drafted for and verified by turns.", "1")
]
Pin = Annotated[bool, _flag("Each lane", "--pin", "Keep each lane to cores of its own.")]
Trace = Annotated[
    str | None, _model("FILE", "Write what lanes did when, for ui.perfetto.dev, at the end.", "none")
]
Engine = Annotated[str, _model("native|hf|toy", "Code that runs the models.")]
Dtype = Annotated[str, _model("fp32|bf16|fp16", "Type of weights and arithmetic.")]
Device = Annotated[str, _model("DEVICE", "auto, cpu, cuda, cuda:N or a GPU's UUID, for both lanes.")]
TargetDevice = Annotated[str | None, _lane("DEVICE", "Of the target lane.", "as --device")]
SpeculatorDevice = Annotated[str | None, _lane("DEVICE", "Of the speculator lane.", "as --device")]
TargetEnv = Annotated[
    list[str] | None, _lane("NAME=VALUE", "In the environment of the target's process; repeatable.", "none")
]
SpeculatorEnv = Annotated[
    list[str] | None, _lane("NAME=VALUE", "In that of the speculator's process; repeatable.", "none")
]
TargetCores = Annotated[str | None, _lane("CORES", "Cores of the target's process, such as 0-3.", "all")]
SpeculatorCores = Annotated[str | None, _lane("CORES", "Cores of the speculator's process.", "all")]
Lanes = Annotated[
    str,
    _model("process|inline", "Each lane in a process of its own, or all in this one, for debuggers."),
]
TargetRanks = Annotated[
    int | None,
    _model("N", "Processes that share the target model, each with a part of it: tensor parallelism.", "1"),
]
Transport = Annotated[
    str,
    _model("auto|cuda_ipc|memfd|inline", "How tensors go from lane to lane; auto is the first that works."),
]
RequireCudaIpc = Annotated[
    bool, _flag("Model", "--require-cuda-ipc", "Rather fail than have tensors go another way.")
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
Acceptance = Annotated[
    str,
    _model(
        "coupled|rejection|block",
        "How drafts are judged: the same text whatever drafts, or longer drafts of the same distribution.",
    ),
]
QRows = Annotated[
    str, _model("sparse|full", "What drafts are drawn from unless coupled: the likeliest 64 tokens, or all.")
]
MaxVerifyTokens = Annotated[
    int | None, _model("N", "Tokens that one verification of all sequences takes.", "one pass of the target")
]
Threads = Annotated[int | None, _model("N", "CPU threads of each lane.", "all cores")]
Attach = Annotated[
    str,
    _model("now|later", "Whether a speculator server must serve at the start, or may come later."),
]
Keys = Annotated[
    str | None, _model("DIRECTORY", "Keys for speculator servers, made by speclane keys.", "none")
]
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

PromptLogprobs = Annotated[int | None, _sampling("N", "The same of the prompt's tokens.")]

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
