"""What `bench decode` is to measure: which modes, by which acceptance, on which prompts, how often. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args

from executor.config import MAX_SEQUENCES, available_cores
from executor.errors import InvalidConfig
from ipc.messages import Acceptance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.bench.peers import Peer
    from executor.bench.prompts import Prompt
    from executor.config import Config

T = TypeVar("T", bound=str)

Mode = Literal["off", "sequential", "ahead", "outcomes", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
ACCEPTANCES: tuple[Acceptance, ...] = get_args(Acceptance)


class Variant(NamedTuple):
    """A row of results. `acceptance`: how drafts are judged; None where there are none."""

    mode: Mode
    acceptance: Acceptance | None

    def bound(self, temperature: float) -> bool:
        """Whether its text is the same whatever is drafted."""
        return self.acceptance in (None, "coupled") or temperature == 0.0


OFF = Variant("off", None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `config` is that of the speculating modes; a prompt's seed is `seed` + its index.

    `acceptances`: each mode is measured by each of them; none: by that of `config`. `timeline`: whether
    executors keep what their lanes did last; see `LLM.trace`.
    """

    config: Config
    prompts: Sequence[Prompt]
    modes: Sequence[Mode]
    acceptances: Sequence[Acceptance] = ()
    new_tokens: int
    temperature: float
    seed: int
    repeat: int
    raw: bool = False
    peers: Sequence[Peer] = ()
    timeline: bool = False

    @property
    def ways(self) -> Sequence[Acceptance]:
        return self.acceptances or (self.config.acceptance,)

    @property
    def variants(self) -> list[Variant]:
        """Modes in their order, each by all ways of acceptance."""
        return [
            variant
            for mode in self.modes
            for variant in ([OFF] if mode == "off" else [Variant(mode, way) for way in self.ways])
        ]

    def name(self, variant: Variant) -> str:
        """`sequential`; or `sequential block`, where there are several ways."""
        if variant.acceptance is None or len(self.ways) == 1:
            return variant.mode
        return f"{variant.mode} {variant.acceptance}"

    def config_of(self, variant: Variant) -> Config:
        """Of the executor that is measured."""
        config, trace = self.config, self.config.trace
        if trace is not None:
            trace = trace.with_stem(f"{trace.stem}-{self.name(variant).replace(' ', '-')}")
        if variant.mode == "off" or variant.acceptance is None:
            return replace(config, speculator="off", trace=trace)
        # What was said of hypotheses is for the modes that have some.
        hypotheses = 0 if variant.mode == "sequential" else config.hypotheses
        return replace(
            config, mode=variant.mode, acceptance=variant.acceptance, hypotheses=hypotheses, trace=trace
        )


def at_batches(plan: Plan, batches: Sequence[int]) -> list[Plan]:
    """The same with so many sequences at once; traces of several are told apart by their names."""
    plans = []
    for batch in batches:
        trace = plan.config.trace
        if trace is not None and len(batches) > 1:
            trace = trace.with_stem(f"{trace.stem}-batch{batch}")
        plans.append(replace(plan, config=replace(plan.config, max_sequences=batch, trace=trace)))
    return plans


def parse_modes(text: str) -> list[Mode]:
    """`off,sequential`. Raises InvalidConfig."""
    return _parse("modes", text, MODES)


def parse_acceptances(text: str) -> list[Acceptance]:
    """`coupled,rejection`. Raises InvalidConfig."""
    return _parse("acceptance", text, ACCEPTANCES)


def parse_batches(text: str) -> list[int]:
    """`1,2,4,8`. Raises InvalidConfig."""
    batches: list[int] = []
    for part in text.split(","):
        batch = int(part) if part.strip().isdecimal() else 0
        if not 1 <= batch <= MAX_SEQUENCES:
            raise InvalidConfig(
                "batch",
                f"batch must be whole, from 1 to {MAX_SEQUENCES}, got {part.strip()!r}; try 8 or 1,2,4,8",
            )
        if batch in batches:
            raise InvalidConfig("batch", f"batch names {batch} twice; try 1,2,4,8")
        batches.append(batch)
    return batches


def total_threads(plan: Plan) -> int:
    """The most that the lanes of any mode compute with at once: of one if they take turns, else of both."""
    most = 1
    for variant in plan.variants:
        config = plan.config_of(variant)
        target, speculator = config.threads_of("target"), config.threads_of("speculator")
        if variant.mode == "off":
            own = target
        elif variant.mode == "sequential":
            own = max(target, speculator)
        else:
            own = target + speculator
        most = max(most, own)
    return min(most, available_cores())


def _parse(field: str, text: str, known: Sequence[T]) -> list[T]:
    found: list[T] = []
    for part in text.split(","):
        one = next((each for each in known if each == part.strip()), None)
        if one is None:
            raise InvalidConfig(
                field,
                f"{field} has no {part.strip()!r}, only {', '.join(known)}; try {','.join(known)}",
            )
        if one in found:
            raise InvalidConfig(field, f"{field} names {one} twice; try {','.join(known)}")
        found.append(one)
    return found
