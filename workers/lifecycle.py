"""From a lane spec to a lane: which engine, which speculator. Imports only what the spec needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import msgspec

from ipc.messages import LaneName
from workers.speculator import SpeculatorLane
from workers.target import TargetLane

if TYPE_CHECKING:
    from typing import Any

    from ipc.messages import LaneSpec
    from workers.engines.engine import Engine


LANES = get_args(LaneName)


def load(spec: LaneSpec) -> TargetLane | SpeculatorLane:
    """Raises ValueError for a spec that cannot work, OSError for a checkpoint that cannot be read."""
    if spec.lane == "target":
        return TargetLane(_engine(spec))
    if spec.engine == "ngram":
        from workers.speculators.ngram import NgramSpeculator

        return SpeculatorLane(NgramSpeculator(spec))
    if spec.engine == "suffix":
        from workers.speculators.suffix import SuffixSpeculator

        return SpeculatorLane(SuffixSpeculator(spec))
    from workers.speculators.draft import DraftSpeculator

    return SpeculatorLane(DraftSpeculator(_engine(spec)))


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
