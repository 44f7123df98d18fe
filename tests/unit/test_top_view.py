"""What `speclane top` makes of two looks at an executor."""

from __future__ import annotations

import io
from collections import deque

import msgspec
from rich.console import Console

from executor.cli.top_view import TopView, changes, sparkline
from executor.status import HealthStatus, LaneStatus, LoadStatus, MemoryStatus, Status, Totals

MEMORY = MemoryStatus("target", "cpu", 4096, 200_000_000, 500_000_000, 40_000_000, 0, 60_000_000)


def look(tokens: int, accepted: int, rounds: int, *, deaths: int = 0, busy: float = 0.0) -> Status:
    lanes = [
        LaneStatus("target", "serving", 2, "t", "toy", "m", 0, 0.5, rounds, 0, busy),
        LaneStatus(
            "speculator", "serving", 3, f"s{deaths}", "toy", "m", deaths, 0.5, rounds, deaths, busy / 2
        ),
    ]
    totals = Totals(rounds, tokens, 2 * accepted, accepted, *[0] * 7)
    state = "degraded" if deaths else "healthy"
    return Status(
        1,
        "ngram",
        HealthStatus(state, "", 0.0),
        lanes,
        totals,
        LoadStatus(2, 1, 99),
        [10, 10],
        [8, 5],
        [MEMORY],
    )


def test_rates_are_of_the_last_seconds():
    view = TopView()
    for second in range(6):
        view.add(look(100 * second, 60 * second, 20 * second, busy=0.5 * second), 1000.0 + second)
    told = view.as_dict()
    assert (told["tok_s"], told["rounds_s"], told["acceptance_length"]) == (100.0, 20.0, 2.5)
    assert told["acceptance_by_position"] == [0.8, 0.5]
    assert [lane["busy_share"] for lane in told["lanes"]] == [0.5, 0.25]
    assert told["held_tokens"] == 99
    assert told["memory"] == [msgspec.structs.asdict(MEMORY) | {"total": 800_000_000}]
    assert (told["running"], told["waiting"], told["state"]) == (2, 1, "healthy")


def test_a_first_look_has_no_rates():
    view = TopView()
    view.add(look(100, 60, 20), 1000.0)
    assert view.as_dict()["tok_s"] == 0.0


def test_changes_between_two_looks():
    before, now = look(1, 1, 1), look(2, 1, 2, deaths=1)
    assert changes(before, before) == []
    assert changes(before, now) == ["speculator died", "speculator started again", "healthy → degraded"]
    swapped = msgspec.structs.replace(before, speculation="off")
    assert changes(before, swapped) == ["speculator: ngram → off"]


def test_sparklines_show_what_is_not_nothing():
    assert sparkline(deque([0.0, 0.001, 0.5, 1.0])) == " ▁▄█"


def test_it_can_be_drawn():
    view = TopView()
    view.add(look(1, 1, 1), 1000.0)
    view.add(look(50, 20, 9, deaths=1, busy=0.4), 1000.5)
    console = Console(file=io.StringIO(), width=110)
    console.print(view)
    drawn = console.file.getvalue()
    for part in ("degraded", "98.0 tok/s", "target", "speculator died", "position 2", "2 running, 1 waiting"):
        assert part in drawn
    for part in ("target memory", "800MB", "99 of 4096 tokens held", "weights 500MB", "kv 60.0MB"):
        assert part in drawn
    assert "graphs" not in drawn
