"""What a speculator server says of itself, held against this executor: it was not told what to become.

Each answers why the lane is of no use, in words that name a way out; empty if it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor import heads
from executor.errors import InvalidConfig
from executor.swapping import check_vocabulary
from ipc.messages import WIRE_VERSION

if TYPE_CHECKING:
    from executor.lane import Lane
    from ipc.messages import Ready


def other_version(lane: Lane, version: int) -> str:
    """Of a lane that speaks another version of the wire."""
    reason = f"speaks wire version {version}, this is {WIRE_VERSION}"
    if lane.spec.engine == "remote":
        reason = f"the server at {lane.spec.model} {reason}; run the same version of speclane on both sides"
    return reason


def misfit(lane: Lane, target: Lane | None) -> str:
    """Of a lane that has loaded: whether its drafting head can read this target."""
    if lane.spec.engine != "remote" or lane.head is None or target is None:
        return ""
    try:
        reason = heads.misfit(lane.head, target.spec)
    except InvalidConfig as error:
        reason = f"cannot be held against the target: {error}"
    return reason and (
        f"the server at {lane.spec.model} drafts by a head that {reason}; "
        "use a server made for this target, or --speculator ngram"
    )


def foreign(lane: Lane, ready: Ready, target: Lane | None) -> str:
    """Of a lane that is ready: whether it means the same by token ids. At a first start, where the target may
    not be ready, the coordinator compares them itself; a server may be another one each time."""
    if lane.spec.engine != "remote" or target is None or target.ready is None:
        return ""
    try:
        check_vocabulary(target.ready.vocabulary, ready.vocabulary)
    except InvalidConfig as error:
        return f"the server at {lane.spec.model}: {error}"
    return ""
