"""Where the time of lanes goes: computing, bubbles, the way to them. Written by the coordinator's thread."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, get_args

from executor.histogram import Histogram
from ipc.messages import LaneName

if TYPE_CHECKING:
    from collections.abc import Iterable

_WIRE_SECONDS = (
    *(0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0005, 0.00075, 0.001),
    *(0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1),
)


class LaneTimes:
    """By lane, whichever incarnation: how long it computed, its bubbles, and what the way to it costs.

    busy_ns: computed, all orders together. bubble_ns: it served and had nothing to do while a round ran.
    wire: histograms of seconds from order to reply, less what the lane computed: both ways, with packing and
    waiting for the coordinator to look.
    """

    def __init__(self) -> None:
        self.busy_ns: Counter[LaneName] = Counter()
        self.bubble_ns: Counter[LaneName] = Counter()
        self.wire: dict[LaneName, Histogram] = {name: Histogram(_WIRE_SECONDS) for name in get_args(LaneName)}
        self._seen_ns: Counter[LaneName] = Counter()

    def answered(self, lane: LaneName, seconds: float, busy_ns: int) -> None:
        """An order took so long, from when it was sent to when its reply was read."""
        self.busy_ns[lane] += busy_ns
        self.wire[lane].observe(max(0.0, seconds - busy_ns / 1e9))

    def late(self, lane: LaneName, busy_ns: int) -> None:
        """The reply to an order that nobody waited for any more."""
        self.busy_ns[lane] += busy_ns

    def round_ended(self, total_ns: int, serving: Iterable[LaneName]) -> None:
        """What lanes that served did not compute in a round of this length is bubble."""
        for lane in serving:
            self.bubble_ns[lane] += max(0, total_ns - (self.busy_ns[lane] - self._seen_ns[lane]))
        self._seen_ns.update({lane: busy - self._seen_ns[lane] for lane, busy in self.busy_ns.items()})
