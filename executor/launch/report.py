"""What the launcher says of its processes. Pure: reads them, changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executor import notify
from executor.launch.child import State

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from executor.launch.child import Child


def process(child: Child) -> dict[str, Any]:
    """One process, for the status file."""
    facts = child.facts if child.pid is not None else {}
    pairs = (pair.partition(":") for pair in facts.get(notify.LANES, "").split(",") if pair)
    return {
        "name": child.name,
        "kind": child.plan.kind,
        "state": str(child.state),
        "pid": child.pid,
        "starts": child.starts,
        "url": facts.get(notify.URL),
        "health": facts.get(notify.HEALTH),
        "status": facts.get(notify.STATUS),
        "lanes": {name: int(pid) for name, _, pid in pairs},
        "reason": child.reason or None,
        "exit_status": child.exit_status,
        "log": str(child.log),
    }


def clients(children: Mapping[str, Child], gpu: str) -> dict[str, dict[str, int]]:
    """By process and lane: who must be a client of this GPU's daemon now."""
    expected = {}
    for name, child in children.items():
        if child.state is State.READY and child.pid is not None:
            lanes = process(child)["lanes"] or {child.plan.lanes[0].name: child.pid}
            here = {lane.name for lane in child.plan.lanes if gpu in lane.gpus}
            expected[name] = {lane: pid for lane, pid in lanes.items() if lane.split("/")[0] in here}
    return expected


def serving(children: Sequence[Child]) -> str:
    """The state of all, once all were ready: `healthy`, `degraded` (targets answer), `recovering`."""
    if all(child.healthy for child in children):
        return "healthy"
    targets = [child for child in children if child.plan.kind == "target"]
    answering = all(
        child.state is State.READY and child.facts.get(notify.HEALTH) in ("healthy", "degraded")
        for child in targets
    )
    return "degraded" if answering else "recovering"
