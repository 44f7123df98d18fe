"""Who still needs what the lanes have published in their arenas. Pure: the clock is an argument.

A write to a slot is first unclaimed, then kept by a request and lent to lanes, any number of times; once it
is none of these, its exporter may write there again. What is lent comes back by an ack or by the borrower's
confirmed death, and by nothing else: one that is late is quarantined, not given up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ipc.slots import SLOT_TABLE, SlotEvent, SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ipc.messages import SlotRef

UNCLAIMED_SECONDS = 30.0
"""A reply that nobody used, such as one that came too late, holds its slots no longer than this."""


@dataclass(slots=True)
class _Loan:
    state: SlotState
    due: float


@dataclass(slots=True)
class _Held:
    """`unclaimed`: until when somebody may still want it; None once somebody did."""

    unclaimed: float | None
    keepers: int = 0
    loans: dict[str, _Loan] = field(default_factory=dict)

    @property
    def needed(self) -> bool:
        return self.unclaimed is not None or self.keepers > 0 or bool(self.loans)


class Leases:
    """Borrowers are epochs of lanes. Everything about an arena that is gone is ignored."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: after so long without an ack a loan is quarantined."""
        self._seconds = seconds
        self._arenas: dict[str, dict[SlotRef, _Held]] = {}
        self._released: dict[str, list[SlotRef]] = {}
        self.quarantines = 0
        """Loans that were late, so far."""

    def opened(self, arena: str) -> None:
        self._arenas[arena] = {}

    def knows(self, arena: str) -> bool:
        return arena in self._arenas

    def gone(self, arena: str) -> None:
        """Its exporter is dead, or has let go of it: whoever held something of it holds nothing."""
        self._arenas.pop(arena, None)
        self._released.pop(arena, None)

    def published(self, refs: Iterable[SlotRef], now: float) -> None:
        for ref in refs:
            if (arena := self._arenas.get(ref.arena)) is not None and ref not in arena:
                arena[ref] = _Held(now + UNCLAIMED_SECONDS)

    def keep(self, ref: SlotRef) -> None:
        """One more that wants it; each is to `drop` it."""
        if (held := self._find(ref)) is not None:
            held.unclaimed = None
            held.keepers += 1

    def drop(self, ref: SlotRef) -> None:
        if (held := self._find(ref)) is not None:
            held.keepers -= 1
            self._settle(ref, held)

    def holds(self, ref: SlotRef) -> bool:
        """Whether it is still what it was when it was published."""
        return self._find(ref) is not None

    def refuse(self, ref: SlotRef) -> None:
        """Nobody will want it."""
        if (held := self._find(ref)) is not None:
            held.unclaimed = None
            self._settle(ref, held)

    def lend(self, ref: SlotRef, borrower: str, now: float) -> None:
        """A lane is handed the descriptor. Being handed it again is one loan still."""
        if (held := self._find(ref)) is not None:
            held.unclaimed = None
            state = SLOT_TABLE.step(SlotState.PUBLISHED, SlotEvent.LEASED)
            held.loans[borrower] = _Loan(state, now + self._seconds)

    def acked(self, refs: Iterable[SlotRef], borrower: str) -> None:
        """It has read them. Of what it was not lent, this says nothing."""
        for ref in refs:
            self._end(ref, borrower, SlotEvent.RELEASED)

    def died(self, borrower: str) -> None:
        """Confirmed: it reads nothing any more."""
        for arena in self._arenas.values():
            for ref in [ref for ref, held in arena.items() if borrower in held.loans]:
                self._end(ref, borrower, SlotEvent.PEER_DIED)

    def look(self, now: float) -> list[tuple[str, int]]:
        """What time alone does; returns who is late now, and with how many loans."""
        late: dict[str, int] = {}
        for arena in self._arenas.values():
            for ref, held in list(arena.items()):
                for borrower, loan in held.loans.items():
                    if loan.state is SlotState.LEASED and now >= loan.due:
                        loan.state = SLOT_TABLE.step(loan.state, SlotEvent.TIMED_OUT)
                        late[borrower] = late.get(borrower, 0) + 1
                if held.unclaimed is not None and now >= held.unclaimed:
                    held.unclaimed = None
                    self._settle(ref, held)
        self.quarantines += sum(late.values())
        return list(late.items())

    def take_released(self, exporter: str) -> list[SlotRef]:
        """What is free of a lane's arenas, said once."""
        if not self._released:
            return []
        names = [arena for arena in self._released if exporter_of(arena) == exporter]
        return [ref for arena in names for ref in self._released.pop(arena)]

    def count(self) -> dict[str, int]:
        """Of what is held: how much is kept by requests, lent, and lent for too long."""
        everything = [held for arena in self._arenas.values() for held in arena.values()]
        states = [loan.state for held in everything for loan in held.loans.values()]
        return {
            "kept": sum(held.keepers > 0 for held in everything),
            "lent": states.count(SlotState.LEASED),
            "quarantined": states.count(SlotState.QUARANTINED),
        }

    def _find(self, ref: SlotRef) -> _Held | None:
        arena = self._arenas.get(ref.arena)
        return arena.get(ref) if arena is not None else None

    def _end(self, ref: SlotRef, borrower: str, event: SlotEvent) -> None:
        held = self._find(ref)
        loan = held.loans.pop(borrower, None) if held is not None else None
        if held is not None and loan is not None:
            SLOT_TABLE.step(loan.state, event)
            self._settle(ref, held)

    def _settle(self, ref: SlotRef, held: _Held) -> None:
        if not held.needed:
            del self._arenas[ref.arena][ref]
            self._released.setdefault(ref.arena, []).append(ref)


def arena_name(epoch: str, number: int) -> str:
    """Of a lane's n-th arena; never used again, as its epoch is not."""
    return f"{epoch}/{number}"


def exporter_of(arena: str) -> str:
    """The epoch of the lane whose arena that is."""
    return arena.partition("/")[0]
