"""How a lane comes to serve: which engine and speculator it is made of, and the steps of its start.

The steps are one table: each is taken once, in this order, and none can be left out. Imports only what the
spec needs.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar, get_args

import msgspec

from ipc.messages import Phase
from ipc.table import Table
from workers.followers import ALONE
from workers.speculator import SpeculatorLane
from workers.target import TargetLane

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

    from ipc.messages import LaneSpec, OpenedSequence
    from workers.constraints import Constraints
    from workers.engines.engine import Engine, Served
    from workers.followers import Place
    from workers.guide import Guides
    from workers.lane import Constrain

_IN_RANKS = (("target", "native"), ("target", "toy"))
STEPS: tuple[Phase, ...] = get_args(Phase)
START: Table[str, str] = Table("start of a lane", {step: step[1] for step in pairwise(("born", *STEPS))})

S = TypeVar("S", bound="Served")


class Lifecycle:
    """Where a lane stands in its start. `report` is told of each step done and how many seconds it took."""

    def __init__(self, report: Callable[[Phase, float, str], None], born: float) -> None:
        """`born`: when the process began, by time.monotonic; the first step counts from there."""
        self.phase: str = "born"
        self._report = report
        self._born: float | None = born

    @contextmanager
    def step(self, phase: Phase) -> Iterator[list[str]]:
        """Take a step; what is appended to the list is its outcome. It is done when the block ends well.

        Raises ProtocolError, before anything is done, for a step that is not the next one.
        """
        reached = START.step(self.phase, phase)
        began, self._born = self._born or time.monotonic(), None
        outcome: list[str] = []
        yield outcome
        self.phase = reached
        self._report(phase, time.monotonic() - began, ", ".join(outcome))


def load(spec: LaneSpec, place: Place = ALONE) -> TargetLane | SpeculatorLane:
    """Raises ValueError for a spec that cannot work, OSError for a checkpoint that cannot be read."""
    if place.ranks != spec.ranks or (spec.ranks > 1 and (spec.lane, spec.engine) not in _IN_RANKS):
        raise ValueError(f"{spec.ranks} ranks of a {spec.lane} on engine {spec.engine}; try 1")
    if (spec.lane, spec.engine) == ("speculator", "ngram"):
        from workers.speculators.ngram import NgramSpeculator

        return SpeculatorLane(NgramSpeculator(spec), None, spec.acceptance)
    if (spec.lane, spec.engine) == ("speculator", "suffix"):
        from workers.speculators.suffix import SuffixSpeculator

        return SpeculatorLane(SuffixSpeculator(spec), None, spec.acceptance)
    if (spec.lane, spec.engine) in (("speculator", "eagle"), ("speculator", "cascade")):
        from workers.speculators.cascade import CascadeSpeculator

        head = CascadeSpeculator(msgspec.structs.replace(spec, device=_device(spec)))
        constrain = _constrain(spec, head.vocabulary.size)
        return SpeculatorLane(head, constrain, spec.acceptance, spec.q_rows)
    engine = _engine(spec, place)
    if place.rank > 0:
        return TargetLane(engine, None, None)  # whatever it samples, nobody asks
    constrain = _constrain(spec, engine.vocabulary.size)
    if spec.lane == "target":
        return TargetLane(engine, constrain, spec.acceptance)
    from workers.speculators.draft import DraftSpeculator

    return SpeculatorLane(DraftSpeculator(engine), constrain, spec.acceptance, spec.q_rows)


def _constrain(spec: LaneSpec, vocabulary_size: int) -> Constrain:
    # Few requests ask for any of this, and a lane that starts again must not wait for its imports.
    @cache
    def guides() -> Guides:
        from workers.guide import Guides

        return Guides(spec.model, vocabulary_size)

    def constrain(opened: OpenedSequence) -> Constraints:
        from workers.constraints import Constraints

        its = opened.sampling.constraints
        assert its is not None, "only asked for sequences that have some"
        guide = guides().guide(its.grammar, its.end_token_ids) if its.grammar else None
        return Constraints(its, opened.sampling, opened.prompt_len, vocabulary_size, guide)

    return constrain


def made_ready(served: S, kv_tokens: int | None = None) -> S:
    """Take all steps after load without a coordinator; kv_tokens None is as many as can be of use."""
    served.set_up_attention()
    profile = served.profile()
    served.allocate(profile.max_kv_tokens if kv_tokens is None else kv_tokens)
    served.warm_up()
    served.capture()
    served.lock()
    return served


def _engine(spec: LaneSpec, place: Place) -> Engine[Any]:
    # A toy must start in milliseconds, so torch is imported only by the engines that need it.
    if spec.engine == "toy":
        from workers.engines.toy import ToyEngine

        return ToyEngine(spec)
    spec = msgspec.structs.replace(spec, device=_device(spec, place.rank))
    if spec.engine == "native":
        from workers.engines.native import NativeEngine
        from workers.group import open_group

        return NativeEngine(spec, open_group(place, spec.device))
    if spec.engine == "hf":
        from workers.engines.hf import HfEngine

        return HfEngine(spec)
    raise ValueError(f"engine {spec.engine!r} cannot run a model; use native, hf or toy")


def _device(spec: LaneSpec, rank: int = 0) -> str:
    """`auto` is a GPU for each lane while there are enough, else the same one, else the CPU.

    Ranks of a lane take one GPU each, in a row from the lane's own on.
    """
    name = spec.device
    if name == "auto":
        import torch

        count = torch.cuda.device_count()
        if count == 0:
            return "cpu"
        first = spec.first_gpu if spec.ranks > 1 else min(spec.first_gpu, count - 1)
        name = f"cuda:{first}"
    if spec.ranks == 1 or name == "cpu":
        return name
    first = int(name.partition(":")[2] or 0)
    return f"cuda:{first + rank}"
