"""From a lane spec to a lane: which engine, which speculator. Imports only what the spec needs."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, get_args

import msgspec

from ipc.messages import LaneName
from workers.speculator import SpeculatorLane
from workers.target import TargetLane

if TYPE_CHECKING:
    from typing import Any

    from ipc.messages import LaneSpec, OpenedSequence
    from workers.constraints import Constraints
    from workers.engines.engine import Engine
    from workers.guide import Guides
    from workers.lane import Constrain


LANES = get_args(LaneName)


def load(spec: LaneSpec) -> TargetLane | SpeculatorLane:
    """Raises ValueError for a spec that cannot work, OSError for a checkpoint that cannot be read."""
    if spec.engine == "ngram":
        from workers.speculators.ngram import NgramSpeculator

        return SpeculatorLane(NgramSpeculator(spec), constrain=None)
    engine = _engine(spec)
    constrain = _constrain(spec, engine.vocabulary.size)
    if spec.lane == "target":
        return TargetLane(engine, constrain)
    from workers.speculators.draft import DraftSpeculator

    return SpeculatorLane(DraftSpeculator(engine), constrain)


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


def _engine(spec: LaneSpec) -> Engine[Any]:
    # A toy must start in milliseconds, so torch is imported only by the engines that need it.
    if spec.engine == "toy":
        from workers.engines.toy import ToyEngine

        return ToyEngine(spec)
    spec = msgspec.structs.replace(spec, device=_device(spec))
    if spec.engine == "native":
        from workers.engines.native import NativeEngine

        return NativeEngine(spec)
    if spec.engine == "hf":
        from workers.engines.hf import HfEngine

        return HfEngine(spec)
    raise ValueError(f"engine {spec.engine!r} cannot run a model; use native, hf or toy")


def _device(spec: LaneSpec) -> str:
    """`auto` is a GPU for each lane while there are enough, else the same one, else the CPU."""
    if spec.device != "auto":
        return spec.device
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return "cpu"
    return f"cuda:{min(LANES.index(spec.lane), count - 1)}"
