"""Who profiles next and who may allocate how much, while lanes come to serve. Holds the memory plan.

At the start all lanes load, then those on one device profile one after the other, then the plan is solved. A
lane that comes later passes through the same door: one of a spec that is in the plan gets what its like got,
another one must fit beside what runs. Does no I/O.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from executor.capacity import join, solve
from ipc.link import LinkState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.capacity import LanePlan, MemoryLimits, MemoryPlan
    from executor.lane import Lane
    from ipc.messages import LaneName, LaneSpec


_NOT_LOADED = {LinkState.EXPECTED, LinkState.GREETED, LinkState.STARTING}


class Allocation:
    def __init__(self, limits: MemoryLimits, standby: Sequence[LaneName]) -> None:
        """`standby`: lanes that have a spare, so that memory is planned for two."""
        self._limits = limits
        self._standby = standby
        self._solved: MemoryPlan | None = None
        self._shares: dict[LaneSpec, tuple[LanePlan, ...]] = {}

    @property
    def plan(self) -> MemoryPlan | None:
        """What the lanes that there are hold; None until all of the first have profiled."""
        shares = tuple(chain.from_iterable(self._shares.values()))
        return self._solved and replace(self._solved, lanes=shares)

    def turns(self, starting: Sequence[Lane]) -> list[Lane]:
        """The lanes that may profile now, of those that start.

        Until there is a plan, all wait until all are loaded: a lane sees what others took of its device.
        """
        if self._solved is None and any(lane.link.state in _NOT_LOADED for lane in starting):
            return []
        profiling = [lane for lane in starting if lane.link.state is LinkState.PROFILING]
        busy = {device for lane in profiling for device in lane.device_ids}
        turns = []
        for lane in starting:
            if lane.link.state is LinkState.LOADED and busy.isdisjoint(lane.device_ids):
                busy.update(lane.device_ids)
                turns.append(lane)
        return turns

    def solve(self, starting: Sequence[Lane]) -> None:
        """Make the plan, once all lanes have profiled. Raises InvalidConfig if none works."""
        profiles = {lane.name: lane.profiles for lane in starting if lane.profiles}
        if self._solved is None and len(profiles) == len(starting):
            self._solved = solve(profiles, self._limits, self._standby)
            shares = self._solved.lanes
            self._shares = {
                lane.spec: tuple(share for share in shares if share.lane == lane.name) for lane in starting
            }

    def share(self, lane: Lane) -> LanePlan | None:
        """What a lane that has profiled may take, its first rank as all; None: not known yet.

        Raises InvalidConfig if too much.
        """
        plan = self.plan
        if plan is None or not lane.profiles:
            return None
        if lane.spec not in self._shares:
            copies = 2 if lane.name in self._standby else 1
            self._shares[lane.spec] = join(plan, lane.name, lane.profiles, copies)
        return self._shares[lane.spec][0]

    def keep(self, specs: Sequence[LaneSpec]) -> None:
        """Only lanes of these specs are left: what others took is free again."""
        self._shares = {spec: shares for spec, shares in self._shares.items() if spec in specs}
