"""What a user may set, checked before anything is loaded, and what each lane is told to become."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from executor.errors import InvalidConfig
from executor.models import DEFAULT_TARGET
from executor.restart import RestartPolicy
from ipc.messages import LaneName

if TYPE_CHECKING:
    from pathlib import Path

EngineName = Literal["native", "hf", "toy"]
DtypeName = Literal["fp32", "bf16", "fp16"]

MAX_SPECULATIVE_TOKENS = 32
MAX_SEQUENCES = 1024
_MAX_SECONDS = 1e9
"""What waits of the standard library can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. A missed draft means a plain step, a missed verdict a failed target."""

    load: float = 600.0
    draft: float = 10.0
    verify: float = 120.0
    hang: float = 30.0
    """A speculator that owes its answer for so long is ended."""
    stop: float = 3.0

    def __post_init__(self) -> None:
        """Raises InvalidConfig."""
        for name in ("load", "draft", "verify", "hang", "stop"):
            default: Any = type(self).__dataclass_fields__[name].default
            check_seconds(f"{name}_timeout", getattr(self, name), default)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What happens when a lane dies.

    policy: how often it is started again.
    group: `separate` lanes die alone; `one_for_all`: all start again together, as lanes that share a GPU
        under MPS must, since a GPU fault of one ends them all.
    standby: lanes with a spare process, loaded and ready to take over.
    strikes: a request during which the target died so many times in a row fails, alone.
    collapse_rounds, collapse_share: if of the tokens drafted in so many rounds a smaller share than this is
        accepted, the speculator is started again, once.
    """

    policy: RestartPolicy = field(default_factory=RestartPolicy)
    group: Literal["separate", "one_for_all"] = "separate"
    standby: tuple[LaneName, ...] = ()
    strikes: int = 3
    collapse_rounds: int = 256
    collapse_share: float = 0.01

    def __post_init__(self) -> None:
        """Raises InvalidConfig."""
        _one_of("group", self.group, ("separate", "one_for_all"))
        for lane in self.standby:
            _one_of("standby", lane, get_args(LaneName))
        _whole("strikes", self.strikes, 1, 100, "3")
        _whole("collapse_rounds", self.collapse_rounds, 1, 1 << 30, "256")
        if not 0 <= self.collapse_share <= 1:
            raise InvalidConfig(
                "collapse_share", f"collapse-share must be from 0 to 1, got {self.collapse_share!r}; try 0.01"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One executor.

    target: model of the target lane: `smollm2-135m`, a checkpoint directory or a hub id; a toy's parameters
        if `engine` is toy.
    speculator: `off`, `ngram` (prompt lookup), or a model as above.
    engine: `native` (own code, batch-invariant on CPUs), `hf` (any transformers model), `toy` (no weights).
    dtype: of weights and arithmetic; see the engine's notes for CPUs without bf16 or fp16 arithmetic.
    device: `auto`, `cpu`, `cuda` or `cuda:N`, for both lanes; `auto` is the first free GPU, else the CPU.
    num_speculative_tokens: longest draft, K.
    max_model_len: longest sequence in tokens, prompt included; None is the target's own context.
    max_sequences: how many sequences run at once; more wait.
    threads: threads of each lane's arithmetic on CPUs; None is all cores that this process may use.
    cache_dir: where fetched checkpoints are kept; None is $SPECLANE_CACHE, else the user's cache directory.
    """

    target: str = ""
    speculator: str = "ngram"
    engine: EngineName = "native"
    dtype: DtypeName = "bf16"
    device: str = "auto"
    num_speculative_tokens: int = 5
    max_model_len: int | None = None
    max_sequences: int = 8
    threads: int | None = None
    cache_dir: Path | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    recovery: Recovery = field(default_factory=Recovery)

    def __post_init__(self) -> None:
        """Raises InvalidConfig naming the field."""
        if not self.target:
            object.__setattr__(self, "target", "vocabulary=256" if self.engine == "toy" else DEFAULT_TARGET)
        _one_of("engine", self.engine, get_args(EngineName))
        _one_of("dtype", self.dtype, get_args(DtypeName))
        name, _, index = self.device.partition(":")
        if name not in ("auto", "cpu", "cuda") or (index and (name != "cuda" or not index.isdigit())):
            raise InvalidConfig(
                "device", f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}; try auto"
            )
        if not self.speculator:
            raise InvalidConfig(
                "speculator", "speculator must not be empty; try off, ngram or a checkpoint directory"
            )
        whole = "num_speculative_tokens", "max_sequences"
        for option, high, works in zip(
            whole, (MAX_SPECULATIVE_TOKENS, MAX_SEQUENCES), ("5", "8"), strict=True
        ):
            _whole(option, getattr(self, option), 1, high, works)
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2, 1 << 24, "2048")
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1024, str(available_cores()))

    @property
    def speculates(self) -> bool:
        return self.speculator != "off"


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_seconds(name: str, seconds: object, works: float) -> None:
    """Raises InvalidConfig about `name` for what is no positive number of seconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MAX_SECONDS:
        option = name.replace("_", "-")
        raise InvalidConfig(
            name, f"{option} must be a positive number of seconds, got {seconds!r}; try {works:g}"
        )


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidConfig(name, f"{name} must be one of {', '.join(known)}, got {value!r}; try {known[0]}")


def _whole(name: str, value: int, low: int, high: int, works: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        option = name.replace("_", "-")
        raise InvalidConfig(
            name, f"{option} must be a whole number from {low} to {high}, got {value!r}; try {works}"
        )
