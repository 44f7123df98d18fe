"""What each lane did in the last rounds of a run, from the events of a trace. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from executor.trace import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

ROUNDS = 20
_LANES = {row: lane for lane, row in ROWS.items()}


class Slice(NamedTuple):
    """`began` and `length` in milliseconds since the first one. `what`: of the work, in words."""

    lane: str
    name: str
    began: float
    length: float
    what: str


def last_rounds(events: Iterable[dict[str, Any]], rounds: int = ROUNDS) -> list[Slice]:
    """Work since the verification before the last `rounds` ended, by its beginning; a round has one."""
    work = sorted((event for event in events if event["ph"] == "X"), key=lambda event: float(event["ts"]))
    verified = [event for event in work if event["name"] == "verify"]
    if not verified:
        return []
    before = verified[-rounds - 1 : -rounds]
    since = _end(before[0]) if before else work[0]["ts"]
    shown = [event for event in work if event["ts"] >= since and _end(event) > since]
    zero = shown[0]["ts"]
    return [
        Slice(
            _LANES[event["pid"]],
            event["name"],
            (event["ts"] - zero) / 1e3,
            event["dur"] / 1e3,
            _words(event["args"]),
        )
        for event in shown
    ]


def span(slices: Sequence[Slice]) -> float:
    """Milliseconds from the first beginning to the last end."""
    return max((each.began + each.length for each in slices), default=0.0)


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _words(what: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in what.items())
