"""When a lane that died is started again, and when it is given up. Pure: clock and chance are arguments."""

from __future__ import annotations

from dataclasses import dataclass, field

JITTER = 0.2
"""Share of a delay by which it may be longer, so that lanes that died together do not come back together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """intensity: after more deaths than these within `period` seconds, failed starts included, the lane is
    given up.

    The first restart is at once, the next ones after `backoff` seconds, doubled each time up to
    `backoff_max`; a lane that lived for `period` starts over.
    """

    intensity: int = 10
    period: float = 60.0
    backoff: float = 0.1
    backoff_max: float = 10.0


@dataclass(slots=True)
class RestartHistory:
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    _deaths: list[float] = field(default_factory=list)

    def died(self, now: float, chance: float) -> float | None:
        """Seconds until the next start, or None: no more.

        now: seconds on any monotonic clock; chance: uniform in [0, 1).
        """
        policy = self.policy
        self._deaths = [death for death in self._deaths if now - death < policy.period]
        self._deaths.append(now)
        count = len(self._deaths)
        if count > policy.intensity:
            return None
        if count == 1:
            return 0.0
        delay = min(policy.backoff * 2.0 ** (count - 2), policy.backoff_max)
        return delay * (1.0 + JITTER * chance)
