"""The memory plan of a configuration, without serving: lanes load and profile, then they are let go."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from executor.lanes import Lanes

if TYPE_CHECKING:
    from executor.capacity import LanePlan, MemoryPlan
    from executor.config import Config
    from executor.model import Prepared


@dataclass(frozen=True, slots=True)
class LaneRow:
    """A lane's memory as it is shown, or that of one of its ranks. Sizes in bytes, of one process; `copies`
    counts its spare too.

    process: what its process takes without the model. total: of all that it holds when it serves; peak: the
    most that it ever takes, loading included.
    """

    lane: str
    device: str
    process: int
    weights: int
    activations: int
    workspace: int
    graphs: int
    kv_bytes_per_token: int
    kv_tokens: int
    kv: int
    total: int
    peak: int
    copies: int
    rank: int = 0

    @property
    def name(self) -> str:
        """`target`; `target/1` is its second rank."""
        return f"{self.lane}/{self.rank}" if self.rank else self.lane

    def as_dict(self) -> dict[str, str | int]:
        return asdict(self)


def plan_memory(prepared: Prepared, config: Config) -> MemoryPlan:
    """Starts workers and ends them. Raises InvalidConfig for what does not fit, LaneFailed."""
    lanes = Lanes(
        *(prepared.specs, config.timeouts, config.recovery, config.memory, "process"),
        *(config.placements, config.transport_policy, config.attach_policy),
    )
    try:
        return lanes.plan(time.monotonic() + config.timeouts.load)
    finally:
        lanes.stop()


def rows(plan: MemoryPlan) -> list[LaneRow]:
    return [_row(lane) for lane in plan.lanes]


def _row(lane: LanePlan) -> LaneRow:
    profile = lane.profile
    return LaneRow(
        lane=lane.lane,
        device=profile.device,
        process=profile.process,
        weights=profile.weights,
        activations=profile.activations,
        workspace=profile.workspace,
        graphs=profile.graphs,
        kv_bytes_per_token=profile.kv_bytes_per_token,
        kv_tokens=lane.kv_tokens,
        kv=lane.kv,
        total=lane.total,
        peak=lane.peak,
        copies=lane.copies,
        rank=lane.rank,
    )
