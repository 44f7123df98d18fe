"""Whose order the lane drafts next: the client that has had least of the lane's time. Pure.

Start-time fair queueing (Goyal, Vin and Cheng 1996): an order starts where its client's last one ended, in
time of the lane used, or at the present start if the client had nothing to ask meanwhile. So nobody saves up,
and nobody pays for what was idle. Orders that ask for little share a pass, which costs hardly more than one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence


class Bid(NamedTuple):
    """An order that waits. `work`: as executor.pace counts it; `alone`: takes no others with it."""

    client: Hashable
    work: float
    alone: bool


class Turns:
    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}
        self._starts: dict[Hashable, float] = {}

    def ask(self, client: Hashable) -> None:
        """It has an order from now on."""
        self._starts[client] = max(self._now, self._ends.get(client, 0.0))

    def choose(self, bids: Sequence[Bid]) -> list[Bid]:
        """Who goes next, together. All bidders have asked; nobody is left out for ever."""
        order = sorted(bids, key=lambda bid: self._starts[bid.client])
        first, *others = order
        self._now = max(self._now, self._starts[first.client])
        return [first] if first.alone else [first, *(bid for bid in others if not bid.alone)]

    def pay(self, chosen: Sequence[Bid], seconds: float) -> None:
        """The lane computed for so long for them, each in the measure of its work."""
        whole = sum(bid.work for bid in chosen)
        for bid in chosen:
            self._ends[bid.client] = self._starts[bid.client] + seconds * bid.work / whole

    def forget(self, client: Hashable) -> None:
        """It is gone."""
        self._starts.pop(client, None)
        self._ends.pop(client, None)
