"""What a user may set, checked before anything is loaded, and what each lane is told to become."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from executor import address
from executor.address import Attach, AttachPolicy
from executor.capacity import MemoryLimits
from executor.errors import InvalidConfig
from executor.layout import Layout, layout
from executor.models import DEFAULT_TARGET
from executor.placement import Placement, placement
from executor.restart import RestartPolicy
from executor.setting import MAX_HYPOTHESES, Mode, Setting, setting_for
from executor.transport import TransportName, TransportPolicy
from ipc.messages import Acceptance, LaneName, QForm
from ipc.toy import ToyParameters

EngineName = Literal["native", "hf", "toy"]
Hosting = Literal["process", "inline"]
DtypeName = Literal["fp32", "bf16", "fp16"]

SPECULATORS = ("auto", "off", "ngram", "suffix", "eagle", "cascade")
"""Speculators that are not named by a checkpoint."""
MAX_SPECULATIVE_TOKENS = 32
MAX_SEQUENCES = 1024
MAX_RANKS = 16
_MAX_SECONDS = 1e9
"""What waits of the standard library can take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds. A missed draft means a plain step, a missed verdict a failed target."""

    load: float = 600.0
    draft: float = 10.0
    """A round waits for drafts about as long as they usually take, and never longer than this …"""
    draft_least: float = 0.05
    """… nor, unless `draft` is shorter, less than this. Where it is not less than `draft`, drafts of a server
    are always asked for; else only while that is faster than to go on without."""
    verify: float = 120.0
    hang: float = 30.0
    """A speculator that owes its answer for so long is ended."""
    stop: float = 3.0

    def __post_init__(self) -> None:
        """Raises InvalidConfig."""
        for name in ("load", "draft", "draft_least", "verify", "hang", "stop"):
            default: Any = type(self).__dataclass_fields__[name].default
            check_seconds(f"{name}_timeout", getattr(self, name), default)
        if self.hang < self.draft:
            raise InvalidConfig(
                "hang_timeout",
                f"hang-timeout {self.hang:g} must not be below draft_timeout {self.draft:g}; "
                f"try {self.draft:g}",
            )


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
        _instance("policy", self.policy, RestartPolicy, "RestartPolicy(intensity=10)")
        _whole("intensity", self.policy.intensity, 0, 1 << 30, "10")
        for name, works in (("period", 60.0), ("backoff", 0.1), ("backoff_max", 10.0)):
            check_seconds(name, getattr(self.policy, name), works)
        _one_of("group", self.group, ("separate", "one_for_all"))
        _instance("standby", self.standby, tuple, '("speculator",)')
        for lane in self.standby:
            _one_of("standby", lane, get_args(LaneName))
        _whole("strikes", self.strikes, 1, 100, "3")
        _whole("collapse_rounds", self.collapse_rounds, 1, 1 << 30, "256")
        share = self.collapse_share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise InvalidConfig(
                "collapse_share", f"collapse-share must be from 0 to 1, got {share!r}; try 0.01"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One executor.

    target: model of the target lane: `smollm2-135m`, a checkpoint directory or a hub id; a toy's parameters
        if `engine` is toy.
    speculator: `off`; `ngram` (prompt lookup); `suffix` (what was said before, by all); `eagle` (a head over
        the target's hidden rows); `cascade` (head and suffix, token by token); a head's file.safetensors, in
        cascade; a model as above; or speculator servers, `ipc:///path` or `tcp://HOST:PORT`, with commas: the
        first that serves is it. `auto` is cascade for the default target on the native engine, for which a
        head is shipped, else ngram.
    engine: `native` (own code, batch-invariant on CPUs), `hf` (any transformers model), `toy` (no weights).
    dtype: of weights and arithmetic; see the engine's notes for CPUs without bf16 or fp16 arithmetic.
    device: `auto`, `cpu`, `cuda`, `cuda:N` or a GPU's UUID, for both lanes; `auto` is a GPU for each lane
        while there are enough, else one for both, else the CPU.
    target_device, speculator_device: of one lane, instead of `device`.
    target_env, speculator_env: NAME=VALUE, which that lane's process finds in its environment.
    target_cores, speculator_cores: the only cores that lane's process may use, such as `0-3,8`.
    lanes: `process`, each lane in its own; `inline`, all in this one, which isolates nothing: for debuggers,
        and to compare with.
    target_ranks: processes that share the target model, each with a part of its weights and KV: as many GPUs,
        or tensor parallelism on the CPU. Only with engine native; a toy's ranks have no parts to share.
    num_speculative_tokens: longest draft, K.
    mode: `sequential`: a draft is made, then verified; `ahead`: while it is verified, the next one is made
    for
        the likeliest verdict; `outcomes`: for many; `auto`: what brings most tokens per second, by
        measurement, or no speculation.
    hypotheses: for how many verdicts, N; None is what the mode stands for: 0, 1 or 2 · (K + 1).
    ubatches: 2: sequences are drafted for and verified in two parts that take turns; 1 or None: all at once.
    acceptance: how drafts are judged above temperature 0. `coupled`: the text is a function of prompt,
        sampling and seed, whatever drafts. `rejection` keeps more of a draft, `block` (block verification)
        at least as much; the text is then distributed as the target's own, but hangs on the drafts, too.
    q_rows: of what a draft token is drawn from where acceptance is not coupled: `sparse`, the likeliest 64
        tokens, or `full`, all of them as far as a message has room.
    max_model_len: longest sequence in tokens, prompt included; None is the target's own context.
    max_sequences: how many sequences run at once; more wait.
    memory_budget: bytes that the lanes together may take of each device; None is nine tenths of what is free.
    max_verify_tokens: tokens that one verification of all sequences takes at most, one of each that runs and
        their drafts; None is what the target runs in one pass. The guesses least likely right are left out.
    kv_tokens: tokens whose keys and values each lane holds at most; None is as many as can be of use and fit.
    reuse_prefixes: whether a prompt that begins like an earlier one is spared computing that again.
    threads: threads of each lane's arithmetic on CPUs, which its ranks share; None is the lane's cores: all
        that this process may use where lanes take turns, else a part of them for each; see executor.layout.
    transport: how tensors go from lane to lane: `cuda_ipc` (between GPUs, without a copy), `memfd` (memory
        that both share), `inline` (within messages); `auto` is the first of these that works. What does not
        work falls back to the next, unless `require_cuda_ipc`.
    attach: whether one of the speculator servers must serve at the start: `now`; or the executor begins
        without drafts if none does, and attaches `later`. One that is there, but no good for this target, is
        an error in either case.
    keys: directory of this executor's keys, for servers that want some; those of other hosts must.
    pin: keep each lane to cores of its own. Several executors on one machine would choose the same.
    trace: file for a trace of what lanes did when, for chrome://tracing or ui.perfetto.dev; written at the
    end. cache_dir: where fetched checkpoints are kept; None is $SPECLANE_CACHE, else the user's cache
    directory.
        Text will do; a leading ~ is the user's home.
    """

    target: str = ""
    speculator: str = "auto"
    engine: EngineName = "native"
    dtype: DtypeName = "bf16"
    device: str = "auto"
    target_device: str | None = None
    speculator_device: str | None = None
    target_env: tuple[str, ...] = ()
    speculator_env: tuple[str, ...] = ()
    target_cores: str | None = None
    speculator_cores: str | None = None
    lanes: Hosting = "process"
    target_ranks: int = 1
    num_speculative_tokens: int = 5
    mode: Mode = "sequential"
    hypotheses: int | None = None
    ubatches: int | None = None
    acceptance: Acceptance = "coupled"
    q_rows: QForm = "sparse"
    max_model_len: int | None = None
    max_sequences: int = 8
    memory_budget: int | None = None
    kv_tokens: int | None = None
    reuse_prefixes: bool = True
    max_verify_tokens: int | None = None
    threads: int | None = None
    transport: TransportName = "auto"
    require_cuda_ipc: bool = False
    attach: Attach = "now"
    keys: Path | None = None
    pin: bool = False
    trace: Path | None = None
    cache_dir: Path | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    recovery: Recovery = field(default_factory=Recovery)

    def __post_init__(self) -> None:
        """Raises InvalidConfig naming the field."""
        target = str(ToyParameters()) if self.engine == "toy" else DEFAULT_TARGET
        if self.target in ("", None):
            object.__setattr__(self, "target", target)
        for name, works in (("target", target), ("speculator", "ngram"), ("device", "auto")):
            object.__setattr__(self, name, _text(name, getattr(self, name), works))
        if self.speculator == "auto":
            has_head = self.engine == "native" and self.target == DEFAULT_TARGET
            object.__setattr__(self, "speculator", "cascade" if has_head else "ngram")
        if self.keys is not None:
            object.__setattr__(self, "keys", local_path("keys", self.keys, "./keys"))
        check_servers("speculator", self.speculator, self.keys)
        if self.trace is not None:
            object.__setattr__(self, "trace", local_path("trace", self.trace, "trace.json"))
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", local_path("cache_dir", self.cache_dir, "./models"))
        _one_of("engine", self.engine, get_args(EngineName))
        _one_of("attach", self.attach, get_args(Attach))
        _one_of("dtype", self.dtype, get_args(DtypeName))
        _one_of("lanes", self.lanes, get_args(Hosting))
        _whole("target_ranks", self.target_ranks, 1, MAX_RANKS, "2")
        if self.target_ranks > 1:
            for option, unable, able in (("engine", "hf", "native"), ("lanes", "inline", "process")):
                if getattr(self, option) == unable:
                    raise InvalidConfig(
                        "target_ranks",
                        f"target-ranks {self.target_ranks} needs {option} {able}, got {unable}; "
                        f"try --{option} {able}, or --target-ranks 1",
                    )
        _one_of("mode", self.mode, get_args(Mode))
        if self.hypotheses is not None:
            _whole("hypotheses", self.hypotheses, 0, MAX_HYPOTHESES, "1")
        if self.ubatches is not None:
            _whole("ubatches", self.ubatches, 1, 2, "1")
        _one_of("transport", self.transport, get_args(TransportName))
        _instance("require_cuda_ipc", self.require_cuda_ipc, bool, "True")
        if self.require_cuda_ipc and self.transport not in ("auto", "cuda_ipc"):
            raise InvalidConfig(
                "require_cuda_ipc", f"require-cuda-ipc contradicts transport {self.transport}; try auto"
            )
        if self.require_cuda_ipc and self.device == "cpu":
            raise InvalidConfig(
                "require_cuda_ipc", "require-cuda-ipc contradicts device cpu; try device cuda"
            )
        if self.require_cuda_ipc and self.lanes == "inline":
            raise InvalidConfig(
                "require_cuda_ipc",
                "require-cuda-ipc contradicts lanes inline, which share a process; try lanes process",
            )
        _one_of("acceptance", self.acceptance, get_args(Acceptance))
        _one_of("q_rows", self.q_rows, get_args(QForm))
        for lane, place in self.placements.items():
            if place.cores is not None:
                _present(f"{lane}_cores", place.cores)
            if self.lanes == "inline" and place.apart:
                raise InvalidConfig(
                    "lanes",
                    f"lanes inline give the {lane} lane no process with a place of its own; try process",
                )
        _instance("timeouts", self.timeouts, Timeouts, "Timeouts(load=600.0)")
        _instance("recovery", self.recovery, Recovery, "Recovery(strikes=3)")
        whole = "num_speculative_tokens", "max_sequences"
        for option, high, works in zip(
            whole, (MAX_SPECULATIVE_TOKENS, MAX_SEQUENCES), ("5", "8"), strict=True
        ):
            _whole(option, getattr(self, option), 1, high, works)
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2, 1 << 24, "2048")
        if self.memory_budget is not None:
            _whole("memory_budget", self.memory_budget, 1, 1 << 50, str(4 * 10**9))
        if self.kv_tokens is not None:
            _whole("kv_tokens", self.kv_tokens, 1, 1 << 40, "8192")
        _instance("pin", self.pin, bool, "True")
        _instance("reuse_prefixes", self.reuse_prefixes, bool, "True")
        if self.max_verify_tokens is not None:
            _whole("max_verify_tokens", self.max_verify_tokens, 1, 1 << 20, "64")
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1024, str(available_cores()))

    @property
    def setting(self) -> Setting:
        """How sequences are speculated for. A server prepares nothing ahead: its time is for drafts that
        somebody waits for."""
        setting = setting_for(self.mode, self.num_speculative_tokens, self.hypotheses, self.ubatches)
        return setting._replace(hypotheses=0) if address.is_address(self.speculator) else setting

    @property
    def adapts(self) -> bool:
        """Whether the setting changes with what is measured, as it always does where drafts come from far."""
        waits = self.timeouts.draft_least >= self.timeouts.draft
        return self.mode == "auto" or (address.is_address(self.speculator) and not waits)

    @property
    def attach_policy(self) -> AttachPolicy:
        return AttachPolicy(self.keys, self.attach == "later")

    @property
    def transport_policy(self) -> TransportPolicy:
        return TransportPolicy(self.transport, self.require_cuda_ipc)

    @property
    def memory(self) -> MemoryLimits:
        return MemoryLimits(self.memory_budget, self.kv_tokens, self.max_model_len)

    @property
    def placements(self) -> dict[LaneName, Placement]:
        """Where each lane runs."""
        places = {
            lane: placement(
                lane,
                _own_device(lane, getattr(self, f"{lane}_device")),
                _variables(lane, getattr(self, f"{lane}_env")),
                getattr(self, f"{lane}_cores"),
                self.device,
            )
            for lane in get_args(LaneName)
        }
        if self.pin:
            for lane, place in places.items():
                if place.cores is None:
                    places[lane] = replace(place, cores=frozenset(getattr(self.layout, lane)))
        return places

    @property
    def layout(self) -> Layout:
        """Cores of the lanes on a CPU, where none are given."""
        return layout(sorted(os.sched_getaffinity(0)), self.speculator, self.mode, apart=self.pin)

    def threads_of(self, lane: LaneName) -> int:
        """Of a lane's arithmetic on CPUs."""
        own = self.placements[lane].cores
        return self.threads or len(own if own is not None else getattr(self.layout, lane))

    @property
    def speculates(self) -> bool:
        return self.speculator != "off"


def check_servers(field: str, speculator: str, keys: Path | None) -> None:
    """Raises InvalidConfig, about `field` if addresses cannot be, about `keys` if some are missing."""
    if not address.is_address(speculator):
        return
    for server in address.parse_several(speculator, field):
        if not server.local and keys is None:
            raise InvalidConfig(
                "keys",
                f"keys are needed for {server.text}, which is not on this host; "
                "try --keys DIR, made by: speclane keys DIR",
            )


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _present(name: str, cores: frozenset[int]) -> None:
    usable = os.sched_getaffinity(0)
    if not cores <= usable:
        gone = ", ".join(map(str, sorted(cores - usable)))
        works = ",".join(map(str, sorted(usable)[:2]))
        raise InvalidConfig(
            name, f"{name.replace('_', '-')}: this process may not use core {gone}; try {works}"
        )


def check_seconds(name: str, seconds: object, works: float) -> None:
    """Raises InvalidConfig about `name` for what is no positive number of seconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= _MAX_SECONDS:
        option = name.replace("_", "-")
        raise InvalidConfig(
            name, f"{option} must be a positive number of seconds, got {seconds!r}; try {works:g}"
        )


def local_path(name: str, value: object, works: str) -> Path:
    """A path that was given as text or path, with ~ for a home. Raises InvalidConfig about `name`."""
    text = _text(name, value, works)
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise InvalidConfig(name, f"{name} {text!r} is in the home of no user; try {works}") from None


def _own_device(lane: LaneName, device: object) -> str:
    return "" if device is None else _text(f"{lane}_device", device, "auto")


def _variables(lane: LaneName, variables: object) -> tuple[str, ...]:
    if not isinstance(variables, tuple):
        name = f"{lane}_env"
        raise InvalidConfig(
            name, f'{name} must be a tuple of NAME=VALUE, got {variables!r}; try ("CUDA_VISIBLE_DEVICES=0",)'
        )
    return variables


def _text(name: str, value: object, works: str) -> str:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str) or not text:
        raise InvalidConfig(name, f"{name} must be a text that is not empty, got {value!r}; try {works}")
    return text


def _instance(name: str, value: object, kind: type, works: str) -> None:
    if not isinstance(value, kind):
        raise InvalidConfig(name, f"{name} must be {kind.__name__}, got {value!r}; try {name}={works}")


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        option = name.replace("_", "-")
        raise InvalidConfig(
            name, f"{option} must be one of {', '.join(known)}, got {value!r}; try {known[0]}"
        )


def _whole(name: str, value: int, low: int, high: int, works: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        option = name.replace("_", "-")
        raise InvalidConfig(
            name, f"{option} must be a whole number from {low} to {high}, got {value!r}; try {works}"
        )
