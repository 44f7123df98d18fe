"""Options that commands take together: each group is a type, and a command names it once as a parameter.

What they make stands here, too: a Config and SamplingParams. An option that was not given is None, and then
the executor's own default holds. What a value may be is the executor's to say. Options of drafting mean
nothing with `--speculator off`, but they are no error: a script may try several speculators with the same
others.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from executor.cli import options as o
from executor.cli.speculative_config import speculative_config
from executor.errors import InvalidConfig, InvalidRequest

if TYPE_CHECKING:
    from executor.config import Config, Recovery
    from executor.grammar import Grammar
    from executor.sampling import SamplingParams


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of each group in place of the parameter that takes the group.

    A field of a group that its constructor does not take is no option: so a command fixes what others choose.
    """
    signature = inspect.signature(command)
    groups: dict[str, Any] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if is_dataclass(parameter.annotation)
    }

    def run(**given: Any) -> None:
        made = {
            name: group(**{option.name: given.pop(option.name) for option in _options(group)})
            for name, group in groups.items()
        }
        command(**given, **made)

    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        parameters += (
            _options(groups[name])
            if name in groups
            else [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(option.name, kind, default=option.default, annotation=option.type)
        for option in fields(group)
        if option.init
    ]


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The lanes: what they run, in how much memory, and how long is waited for them."""

    config_file: o.ConfigFile = None
    target: o.Target = None
    speculator: o.Speculator = "auto"
    num_speculative_tokens: o.NumSpeculativeTokens = None
    mode: o.Mode = "sequential"
    hypotheses: o.Hypotheses = None
    ubatches: o.Ubatches = None
    trace: o.Trace = None
    speculative_config: o.SpeculativeConfig = None
    engine: o.Engine = "native"
    dtype: o.Dtype = "bf16"
    device: o.Device = "auto"
    target_device: o.TargetDevice = None
    speculator_device: o.SpeculatorDevice = None
    target_env: o.TargetEnv = None
    speculator_env: o.SpeculatorEnv = None
    target_cores: o.TargetCores = None
    speculator_cores: o.SpeculatorCores = None
    lanes: o.Lanes = "process"
    target_ranks: o.TargetRanks = None
    transport: o.Transport = "auto"
    require_cuda_ipc: o.RequireCudaIpc = False
    max_model_len: o.MaxModelLen = None
    memory_budget: o.MemoryBudget = None
    kv_tokens: o.KvTokens = None
    max_verify_tokens: o.MaxVerifyTokens = None
    acceptance: o.Acceptance = "coupled"
    q_rows: o.QRows = "sparse"
    attach: o.Attach = "now"
    keys: o.Keys = None
    threads: o.Threads = None
    pin: o.Pin = False
    cache_dir: o.CacheDir = None
    load_timeout: o.LoadTimeout = None
    draft_timeout: o.DraftTimeout = None
    hang_timeout: o.HangTimeout = None
    verify_timeout: o.VerifyTimeout = None
    stop_timeout: o.StopTimeout = None

    def config(self, **fixed: Any) -> "Config":
        """`fixed`: fields of the Config that are no options here; one that is None is left out.

        Raises InvalidConfig.
        """
        from executor.config import Config, Timeouts

        chosen = {name: value for name in _CONFIG if (value := getattr(self, name)) is not None}
        chosen |= {name: value for name, value in fixed.items() if value is not None}
        chosen["target_env"] = tuple(self.target_env or ())
        chosen["speculator_env"] = tuple(self.speculator_env or ())
        if self.memory_budget is not None:
            chosen["memory_budget"] = o.nbytes("memory_budget", self.memory_budget)
        if self.speculative_config is not None:
            chosen |= speculative_config(self.speculative_config)
        timeouts = {
            name: value for name, key in _TIMEOUTS.items() if (value := getattr(self, key)) is not None
        }
        made = Config(**chosen, timeouts=Timeouts(**timeouts))
        if self.target == "":  # as good as none to Config, but an empty variable to a script
            raise InvalidConfig("target", f"target must not be empty; try {made.target}")
        return made


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(ModelOptions):
    """The same for a command that means processes: it kills them, and texts stay the same, or asks what they
    take."""

    lanes: str = field(init=False, default="process")
    acceptance: str = field(init=False, default="coupled")
    q_rows: str = field(init=False, default="sparse")


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """What happens when a lane dies."""

    standby: o.Standby = None
    group: o.Group = None

    def recovery(self) -> "Recovery":
        """Raises InvalidConfig."""
        from executor.config import Recovery

        given: Any = {"standby": tuple(self.standby or ()), "group": self.group or "separate"}
        return Recovery(**given)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How tokens are chosen, and where an answer ends."""

    max_tokens: o.MaxTokens = 256
    temperature: o.Temperature = 0.0
    top_p: o.TopP = None
    top_k: o.TopK = None
    min_p: o.MinP = None
    seed: o.Seed = None
    min_tokens: o.MinTokens = None
    stop: o.Stop = None
    stop_token_id: o.StopTokenId = None
    ignore_eos: o.IgnoreEos = False
    logprobs: o.Logprobs = None
    prompt_logprobs: o.PromptLogprobs = None
    presence_penalty: o.PresencePenalty = None
    frequency_penalty: o.FrequencyPenalty = None
    repetition_penalty: o.RepetitionPenalty = None
    bad_word: o.BadWord = None
    json_schema: o.JsonSchema = None
    regex: o.Regex = None
    choice: o.Choice = None

    def params(self) -> "SamplingParams":
        """Raises InvalidRequest."""
        from executor.sampling import SamplingParams

        chosen = {name: value for name in _PARAMS if (value := getattr(self, name)) is not None}
        return SamplingParams(
            **chosen,
            stop=tuple(o.valid_text("stop", text) for text in self.stop or ()),
            stop_token_ids=tuple(self.stop_token_id or ()),
            bad_words=tuple(o.valid_text("bad_word", text) for text in self.bad_word or ()),
            grammar=self._grammar(),
        )

    def _grammar(self) -> "Grammar | None":
        """Of the one option that asks for a form. Raises InvalidRequest."""
        asked = [name for name in ("json_schema", "regex", "choice") if getattr(self, name)]
        if not asked:
            return None
        if len(asked) > 1:
            first, second = (f"--{name.replace('_', '-')}" for name in asked[:2])
            raise InvalidRequest(asked[1], f"{second} contradicts {first}; leave one of them out")
        from executor.grammar import Grammar

        try:
            if self.regex:
                return Grammar("regex", o.valid_text("regex", self.regex))
            if self.choice:
                return Grammar("choice", [o.valid_text("choice", text) for text in self.choice])
            if self.json_schema == "-":
                return Grammar("json_object")
            return Grammar("json_schema", _schema(str(self.json_schema)))
        except InvalidRequest as error:
            raise InvalidRequest(asked[0], str(error)) from None


_CONFIG = (
    *("target", "speculator", "engine", "dtype", "device", "lanes", "num_speculative_tokens"),
    *("max_model_len", "kv_tokens", "max_verify_tokens", "attach", "keys", "threads", "cache_dir"),
    *("acceptance", "q_rows", "mode", "hypotheses", "ubatches", "trace", "pin"),
    *("target_device", "speculator_device", "target_cores", "speculator_cores"),
    *("transport", "require_cuda_ipc", "target_ranks"),
)
"""Options that are fields of the Config as they are."""
_TIMEOUTS = {name: f"{name}_timeout" for name in ("load", "draft", "verify", "hang", "stop")}
_PARAMS = (
    *("max_tokens", "min_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "seed"),
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


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
