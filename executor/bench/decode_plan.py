"""What `bench decode` is to measure: which modes, by which acceptance, in which lanes, on which prompts, how
often. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar, get_args

from executor.config import MAX_SEQUENCES, Hosting, available_cores
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
HOSTINGS: tuple[Hosting, ...] = get_args(Hosting)


class Variant(NamedTuple):
    """A row of results. `acceptance`: how drafts are judged; None where there are none. `lanes`: in what they
    live."""

    mode: Mode
    acceptance: Acceptance | None
    lanes: Hosting

    def bound(self, temperature: float) -> bool:
        """Whether its text is the same whatever is drafted."""
        return self.acceptance in (None, "coupled") or temperature == 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `config` is that of the speculating modes; a prompt's seed is `seed` + its index.

    `acceptances`, `hostings`: each mode is measured by each of them and in each kind of lanes; none: as
    `config` says. `timeline`: whether executors keep what their lanes did last; see `LLM.trace`.
    """

    config: Config
    prompts: Sequence[Prompt]
    modes: Sequence[Mode]
    acceptances: Sequence[Acceptance] = ()
    hostings: Sequence[Hosting] = ()
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
    def lanes(self) -> Sequence[Hosting]:
        return self.hostings or (self.config.lanes,)

    @property
    def variants(self) -> list[Variant]:
        """Modes in their order, each by all ways of acceptance; all of them in the first kind of lanes, then
        in the next."""
        return [
            Variant(mode, way, lanes)
            for lanes in self.lanes
            for mode in self.modes
            for way in ([None] if mode == "off" else self.ways)
        ]

    @property
    def plain(self) -> Variant:
        """With what the others are compared, if it is measured."""
        return Variant("off", None, self.lanes[0])

    def name(self, variant: Variant) -> str:
        """`sequential`; or `sequential block inline`, where there are several ways and kinds of lanes."""
        words: list[str] = [variant.mode]
        if variant.acceptance is not None and len(self.ways) > 1:
            words.append(variant.acceptance)
        if len(self.lanes) > 1:
            words.append(variant.lanes)
        return " ".join(words)

    def config_of(self, variant: Variant) -> Config:
        """Of the executor that is measured."""
        config, trace = self.config, self.config.trace
        if trace is not None:
            trace = trace.with_stem(f"{trace.stem}-{self.name(variant).replace(' ', '-')}")
        config = replace(config, lanes=variant.lanes, trace=trace)
        if variant.mode == "off" or variant.acceptance is None:
            return replace(config, speculator="off")
        # What was said of hypotheses is for the modes that have some.
        hypotheses = 0 if variant.mode == "sequential" else config.hypotheses
        return replace(config, mode=variant.mode, acceptance=variant.acceptance, hypotheses=hypotheses)


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


def parse_lanes(text: str) -> list[Hosting]:
    """`process,inline`. Raises InvalidConfig."""
    return _parse("lanes", text, HOSTINGS)


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
