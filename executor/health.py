"""What a user may expect of the executor now, why, since when. Pure; times are seconds since the epoch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.lane import Lane

log = logging.getLogger("speclane")

HealthState = Literal["starting", "healthy", "degraded", "recovering", "failed"]


class Health(NamedTuple):
    """`degraded`: answers without speculation. `recovering`: answers pause until the target is back."""

    state: HealthState
    reason: str
    since: float


class HealthLog:
    """Keeps the present state and logs each change of it."""

    def __init__(self) -> None:
        self.now = Health("starting", "", 0.0)

    def note(self, lanes: Sequence[Lane], *, expected: int, now: float) -> None:
        """`lanes`: the current ones, the target's first; `expected`: how many there should be."""
        target, *others = lanes
        if not target.serving:
            self._become("recovering", f"target lane {target.state}: {target.down_because}", now)
        elif len(lanes) < expected or not all(lane.serving for lane in others):
            down = [lane for lane in others if not lane.serving]
            self._become(
                "degraded", "; ".join(f"{x.name} lane {x.state}: {x.down_because}" for x in down), now
            )
        else:
            self._become("healthy", "", now)

    def end(self, reason: str, now: float) -> None:
        self._become("failed", reason, now)

    def _become(self, state: HealthState, reason: str, now: float) -> None:
        if state != self.now.state:
            log.info("health %s → %s %s", self.now.state, state, reason.rstrip(": "))
            self.now = Health(state, reason.rstrip(": "), now)
