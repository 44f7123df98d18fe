"""What `speclane top` draws: the last minute of an executor, by its status at each look. No I/O, no clock."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from executor.sizes import size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from executor.status import LaneStatus, Status

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 60
_EVENTS = 8
_WINDOW_SECONDS = 3.0
_BAR = 12
_PARTS = ("process", "weights", "scratch", "graphs", "kv")
_COLORS = {"healthy": "green", "degraded": "yellow", "recovering": "yellow", "failed": "red"}


class Rates(NamedTuple):
    """Between two looks. `length`: tokens per verdict."""

    tokens: float
    rounds: float
    length: float


class TopView:
    """`add` each status as it comes; draw at any time."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Status]] = deque()
        self._busy: dict[str, deque[float]] = {}
        self._events: deque[str] = deque(maxlen=_EVENTS)

    def add(self, status: Status, now: float) -> None:
        """`now` in seconds since 1970."""
        if self._looks:
            then, before = self._looks[-1]
            self._note_busy(before, status, now - then)
            stamp = time.strftime("%H:%M:%S", time.localtime(now))
            self._events.extend(f"{stamp}  {change}" for change in changes(before, status))
        self._looks.append((now, status))
        while self._looks[-1][0] - self._looks[0][0] > _WINDOW_SECONDS and len(self._looks) > 2:
            self._looks.popleft()

    def rates(self) -> Rates:
        """Over the last seconds."""
        (then, before), (now, status) = self._looks[0], self._looks[-1]
        seconds = now - then
        if seconds <= 0:
            return Rates(0.0, 0.0, 0.0)
        tokens = status.totals.tokens - before.totals.tokens
        verdicts = tokens - (status.totals.accepted - before.totals.accepted)
        rounds = status.totals.rounds - before.totals.rounds
        return Rates(tokens / seconds, rounds / seconds, tokens / verdicts if verdicts else 0.0)

    def as_dict(self) -> dict[str, Any]:
        """The newest look, for a program."""
        now, status = self._looks[-1]
        rates = self.rates()
        return {
            "at": round(now, 3),
            "pid": status.pid,
            "state": status.health.state,
            "speculator": status.speculation,
            "tok_s": round(rates.tokens, 3),
            "rounds_s": round(rates.rounds, 3),
            "acceptance_length": round(rates.length, 4),
            "acceptance_by_position": [round(share, 4) for share in _shares(status)],
            "setting": status.setting.setting,
            "setting_reason": status.setting.reason,
            "hits": status.setting.hits,
            "misses": status.setting.misses,
            "running": status.load.running,
            "waiting": status.load.waiting,
            "lanes": [
                {
                    "lane": lane.lane,
                    "state": lane.state,
                    "busy_share": round(self._busy.get(lane.lane, deque([0.0]))[-1], 4),
                    "deaths": lane.deaths,
                    "restarts": lane.restarts,
                }
                for lane in status.lanes
            ],
            "held_tokens": status.load.tokens,
            "memory": [
                {"lane": lane.lane, "device": lane.device, "kv_tokens": lane.kv_tokens, "total": lane.total}
                | {part: getattr(lane, part) for part in _PARTS}
                for lane in status.memory
            ],
        }

    def __rich__(self) -> RenderableType:
        if not self._looks:
            return Text("waiting for the executor")
        _, status = self._looks[-1]
        events = Text("\n".join(reversed(self._events)) or "no events yet", style="dim")
        return Group(
            self._head(status),
            self._figures(status),
            Text(),
            self._lanes(status),
            Text(),
            _positions(status),
            Text(),
            _memory(status),
            Text(),
            events,
        )

    # ------------------------------------------------------------ inside

    def _note_busy(self, before: Status, status: Status, seconds: float) -> None:
        earlier = {lane.epoch: lane.busy_seconds for lane in before.lanes}
        for lane in status.lanes:
            history = self._busy.setdefault(lane.lane, deque(maxlen=_COLUMNS))
            computed = lane.busy_seconds - earlier.get(lane.epoch, 0.0)
            history.append(min(1.0, max(0.0, computed / seconds)) if seconds > 0 else 0.0)

    def _head(self, status: Status) -> Text:
        color = _COLORS.get(status.health.state, "white")
        reason = f": {escape(status.health.reason)}" if status.health.reason else ""
        return Text.from_markup(
            f"[bold]speclane[/] {status.pid}  [{color}]{status.health.state}[/]{reason}  "
            f"speculator {escape(status.speculation)}"
        )

    def _figures(self, status: Status) -> Text:
        rates = self.rates()
        return Text.from_markup(
            f"[bold]{rates.tokens:.1f}[/] tok/s  [bold]{rates.length:.2f}[/] tokens per target step  "
            f"{rates.rounds:.1f} rounds/s  {status.load.running} running, {status.load.waiting} waiting\n"
            f"{escape(_setting(status))}"
        )

    def _lanes(self, status: Status) -> Table:
        table = Table.grid(padding=(0, 2))
        for lane in status.lanes:
            history = self._busy.get(lane.lane, deque())
            color = "blue" if lane.lane == "target" else "yellow"
            line = sparkline(history).rjust(_COLUMNS)
            now = f"{history[-1]:4.0%}" if history else "   -"
            table.add_row(f"[{color}]{lane.lane}[/]", _state(lane), f"[{color}]{line}[/]", now)
        return table


def sparkline(shares: deque[float]) -> str:
    """A block for each share, 0 … 1; what is not nothing is seen."""
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[max(1 if share > 0 else 0, round(share * top))] for share in shares)


def changes(before: Status, now: Status) -> list[str]:
    """What happened between two looks."""
    told = []
    earlier = {lane.lane: lane for lane in before.lanes}
    for lane in now.lanes:
        was = earlier.get(lane.lane)
        if was is not None and lane.deaths > was.deaths:
            told.append(f"{lane.lane} died")
        if was is not None and lane.restarts > was.restarts:
            told.append(f"{lane.lane} started again")
    if before.speculation != now.speculation:
        told.append(f"speculator: {before.speculation} → {now.speculation}")
    if before.health.state != now.health.state:
        told.append(f"{before.health.state} → {now.health.state}")
    return told


def _setting(status: Status) -> str:
    """How is speculated, and why."""
    if status.speculation == "off":
        return "no speculation"
    setting = status.setting
    guessed = setting.hits + setting.misses
    foreseen = f", {setting.hits / guessed:.0%} of verdicts foreseen" if guessed else ""
    return f"{setting.setting} ({setting.reason}){foreseen}"


def _state(lane: LaneStatus) -> str:
    color = "green" if lane.state == "serving" else "red"
    return f"[{color}]{lane.state}[/] pid {lane.pid or '-'}, {lane.restarts} restarts"


def _shares(status: Status) -> list[float]:
    accepted = [*status.accepted, *[0] * (len(status.drafted) - len(status.accepted))]
    return [a / d if d else 0.0 for a, d in zip(accepted, status.drafted, strict=True)]


def _memory(status: Status) -> Table:
    """The plan, and how much of the room for tokens is taken."""
    table = Table.grid(padding=(0, 2))
    for lane in status.memory:
        parts = {part: getattr(lane, part) for part in _PARTS}
        told = ", ".join(f"{part} {size(nbytes)}" for part, nbytes in parts.items() if nbytes)
        held = f"{status.load.tokens} of {lane.kv_tokens} tokens held"
        table.add_row(
            f"{lane.lane} memory", f"[bold]{size(lane.total)}[/] on {escape(lane.device)}", held, told
        )
    return table


def _positions(status: Status) -> Table:
    table = Table.grid(padding=(0, 1))
    for i, share in enumerate(_shares(status), 1):
        filled = round(share * _BAR)
        table.add_row(f"position {i}", f"[yellow]{'█' * filled}[/]{'░' * (_BAR - filled)}", f"{share:4.0%}")
    return table
