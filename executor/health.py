"""What a user may expect of the executor now, why, since when. Pure; times are seconds since the epoch."""

from __future__ import annotations

from logging import INFO
from typing import TYPE_CHECKING, Literal, NamedTuple

from executor.events import record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.lane import Lane

HealthState = Literal["starting", "healthy", "degraded", "recovering", "failed"]


class Health(NamedTuple):
    """`degraded`: answers without speculation, or without any use of it. `recovering`: answers pause until
    the target is back."""

    state: HealthState
    reason: str
    since: float


class HealthLog:
    """Keeps the present state and logs each change of it."""

    def __init__(self) -> None:
        self.now = Health("starting", "", 0.0)

    def note(self, lanes: Sequence[Lane], *, expected: int, now: float, alarm: str = "") -> None:
        """`lanes`: the current ones, the target's first; `expected`: how many there should be; `alarm`:
        what is wrong with drafts though all serve."""
        target, *others = lanes
        if not target.serving:
            self._become("recovering", f"target lane {target.state}: {target.down_because}", now)
        elif len(lanes) < expected or not all(lane.serving for lane in others):
            down = [lane for lane in others if not lane.serving]
            self._become(
                "degraded", "; ".join(f"{x.name} lane {x.state}: {x.down_because}" for x in down), now
            )
        elif alarm:
            self._become("degraded", alarm, now)
        else:
            self._become("healthy", "", now)

    def end(self, reason: str, now: float) -> None:
        self._become("failed", reason, now)

    def _become(self, state: HealthState, reason: str, now: float) -> None:
        reason = reason.rstrip(": ")
        if state != self.now.state:
            record(INFO, "health_changed", before=self.now.state, now=state, reason=reason or None)
            self.now = Health(state, reason, now)
        elif reason != self.now.reason:
            self.now = Health(state, reason, self.now.since)
