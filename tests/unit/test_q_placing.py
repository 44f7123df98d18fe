"""Large q rows go by arena where there is room, else inline, else not at all; an unreadable one is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from draws import toy_lane

from executor import dialogue
from executor.leases import Leases
from ipc import q_rows
from ipc.messages import Descriptor, OpenedSequence, QRow, SamplingSpec, VerifyItem
from workers.engines.toy import ToyEngine
from workers.q_placing import QPlacing
from workers.target import TargetLane

SIZE = q_rows.ARENA_ROW_BYTES // 4
LARGE = q_rows.pack(None, [1.0] * SIZE)
SMALL = q_rows.pack([1, 2], [0.5, 0.5])


def descriptor(slot: int = 0, arena: str = "s/0") -> Descriptor:
    return Descriptor(arena, "epoch", slot, 1, 0, 4 * SIZE, "fp32", (SIZE,))


class Plane:
    """An arena of so many rows."""

    def __init__(self, room: int = 1) -> None:
        self.kept: list[QRow] = []
        self._room = room

    def put_q(self, row: QRow, arena: str) -> QRow | None:
        if len(self.kept) == self._room:
            return None
        self.kept.append(row)
        return QRow(b"", b"", descriptor(len(self.kept) - 1, arena))

    def q(self, row: QRow) -> QRow | None:
        return self.kept[row.at.slot] if row.at is not None and row.at.slot < len(self.kept) else None


def test_only_large_rows_go_by_arena_and_only_while_there_is_room(monkeypatch):
    monkeypatch.setattr(q_rows, "MESSAGE_BYTES", q_rows.ARENA_ROW_BYTES + 16)
    plane: Any = Plane()
    placing = QPlacing(plane, "s/0")
    sent = [placing.place(row) for row in (SMALL, LARGE, LARGE, LARGE, SMALL)]
    assert sent == [SMALL, QRow(b"", b"", descriptor()), LARGE, q_rows.LOOKED_UP, q_rows.LOOKED_UP]
    assert plane.kept == [LARGE]
    without = QPlacing(plane, "")
    assert [without.place(row) for row in (LARGE, SMALL)] == [LARGE, SMALL]


def test_a_place_must_be_of_a_whole_row():
    assert q_rows.fault(QRow(b"", b"", descriptor()), 3, SIZE) == ""
    assert q_rows.fault(QRow(b"", b"", descriptor()), 3, SIZE + 1) == "its place is none"
    assert q_rows.fault(QRow(b"", b"abcd", descriptor()), 3, SIZE) == "its place is none"


def test_rows_are_lent_to_a_target_that_reaches_them_and_others_are_let_go():
    leases = Leases(10.0)
    near, far = descriptor(0, "s/0"), descriptor(0, "s/1")
    for at in (near, far):
        leases.opened(at.arena)
        leases.published([at.ref], 0.0)
    transport = SimpleNamespace(leases=leases, reaches=lambda lane, arena: arena == "s/0")
    lanes: Any = SimpleNamespace(transport=transport, now=lambda: 0.0)
    target: Any = SimpleNamespace(epoch="t")
    rows = [QRow(b"", b"", near), SMALL, QRow(b"", b"", far)]
    size = dialogue.inline_bytes(SMALL)
    assert dialogue.q_rows(lanes, target, rows, size) == [rows[0], SMALL, q_rows.LOOKED_UP]
    assert dialogue.q_rows(lanes, target, [SMALL, SMALL], size) == [SMALL, q_rows.LOOKED_UP]
    assert leases.count()["lent"] == 1
    assert leases.take_released("s") == [far.ref]
    leases.acked([near.ref], "t")
    assert leases.take_released("s") == [near.ref]


@pytest.mark.parametrize(
    ("kept", "stands"),
    [
        (q_rows.pack(None, [1e-30, 1.0, 0.0]), True),
        (q_rows.pack(None, [0.0, 1.0, 1.0]), False),
        (q_rows.pack(None, [1.0, float("nan"), 0.0]), False),
        (None, False),
    ],
)
def test_what_the_target_cannot_believe_counts_as_looked_up(kept, stands):
    """Token 0 is sure to stand if it was next to never drawn; looked up, it stands with its p alone."""
    lane = TargetLane(ToyEngine(toy_lane("vocabulary=3,seed=1")), lambda opened: None, "rejection")
    lane.plane = Plane()  # type: ignore[assignment]
    lane.plane.kept = [] if kept is None else [kept]
    accepted = 0
    for seed in range(40):
        lane.open([OpenedSequence(seed, 0, [1, 2], 2, SamplingSpec(1.0, 1.0, 0, 0.0, seed, 0, (), None))])
        item = VerifyItem(seed, 0, 2, [], [0], q=[QRow(b"", b"", descriptor())])
        ((verdict,), _) = lane.verify([item], 100)
        accepted += verdict.n_accepted
        lane.close([seed])
    assert (accepted == 40) == stands
