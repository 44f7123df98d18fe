"""What a lane has been told of each sequence, and the orders that tell it more.

`lane.told` is the whole memory: a lane that was started again has been told nothing, so it is brought up to
date by the same orders as one that meets a sequence for the first time.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ipc.messages import Close, Open, OpenedSequence
from ipc.q_rows import LOOKED_UP

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from executor.lane import Lane
    from executor.lanes import Lanes
    from executor.request import Guesses, Request
    from ipc.messages import Descriptor, HiddenRows, QRow

order_numbers = itertools.count(1)
"""Never used twice, whatever executor and lane."""


def open_at(lanes: Lanes, lane: Lane, request: Request, length: int) -> None:
    """Tell a lane of a sequence that it has not met: its first `length` tokens."""
    # A message each, since frames are capped and long histories together could pass the cap.
    tokens = request.tokens[:length]
    opened = OpenedSequence(request.seq, request.gen, tokens, request.prompt_len, request.spec)
    lane.told[request.seq] = length
    lanes.tell(lane, Open(lane.epoch, [opened]))


def news(lane: Lane, request: Request, length: int | None = None) -> list[int]:
    """The committed tokens up to `length` (all) that are news to a lane; none any more once this is sent."""
    known = lane.told[request.seq]
    lane.told[request.seq] = len(request.tokens) if length is None else length
    return request.tokens[known:length]


def rows(lanes: Lanes, lane: Lane, request: Request, room: int) -> list[HiddenRows]:
    """The hidden rows that are news to a lane that reads them, if they fit into `room` bytes; else later.

    What lies in memory that it does not reach is left out, and costs drafts.
    """
    if lane.head is None:
        return []
    parts = request.rows.since(lane.told_rows.get(request.seq, 0), lane.head)
    if sum(len(part.data) for part in parts) > room:
        return []
    lane.told_rows[request.seq] = request.rows.end
    transport, now = lanes.transport, lanes.now()
    parts = [part for part in parts if part.at is None or transport.reaches(lane, part.at.arena)]
    for part in parts:
        if part.at is not None:
            transport.leases.lend(part.at.ref, lane.epoch, now)
    return parts


def q_rows(lanes: Lanes, lane: Lane, rows: Sequence[QRow], room: int) -> list[QRow]:
    """Rows that draft tokens were drawn from, as they are handed to the target. Those in memory that it does
    not reach, or that waited until their slots were let go, and those that do not fit into `room` bytes, are
    left out: their tokens count as looked up."""
    handed = []
    for row in rows:
        size = inline_bytes(row)
        taken = size <= room if row.at is None else _lent(lanes, lane, row.at)
        handed.append(row if taken else LOOKED_UP)
        room -= size if taken else 0
    return handed


def inline_bytes(row: QRow) -> int:
    return len(row.tokens) + len(row.weights)


def _lent(lanes: Lanes, lane: Lane, at: Descriptor) -> bool:
    leases = lanes.transport.leases
    if not leases.holds(at.ref) or not lanes.transport.reaches(lane, at.arena):
        leases.refuse(at.ref)
        return False
    leases.lend(at.ref, lane.epoch, lanes.now())
    return True


def refuse(lanes: Lanes, rows: Sequence[QRow]) -> None:
    """Rows of q that nobody will read."""
    for row in rows:
        if row.at is not None:
            lanes.transport.leases.refuse(row.at.ref)


def refuse_all(lanes: Lanes, drafts: Iterable[Guesses], but: Guesses | None = None) -> None:
    """The same of drafts, of which one may be used."""
    for draft in drafts:
        if draft is not but:
            refuse(lanes, draft.q)


def drop_placed_draft(lanes: Lanes, request: Request) -> None:
    """A draft whose rows of q lie in an arena does not outlive the target that was to read them."""
    if request.draft is not None and any(row.at is not None for row in request.draft.q):
        refuse(lanes, request.draft.q)
        request.draft = None


def backlog(lane: Lane, request: Request) -> int:
    """How many committed tokens the lane has not been told."""
    return len(request.tokens) - lane.told.get(request.seq, 0)


def forget(lanes: Lanes, request: Request, *, for_good: bool = True) -> None:
    """Both lanes drop the sequence. Unless that is for good, its rows are kept until it is opened again."""
    for lane in lanes.all:
        drop(lanes, lane, request)
    drop_placed_draft(lanes, request)
    if for_good:
        request.rows.clear(lanes.transport.leases)


def drop(lanes: Lanes, lane: Lane, request: Request) -> None:
    """The lane drops the sequence, if it has met it."""
    lane.held.pop(request.seq, None)
    lane.told_rows.pop(request.seq, None)
    if lane.told.pop(request.seq, None) is not None:
        lanes.tell(lane, Close(lane.epoch, [request.seq]))
