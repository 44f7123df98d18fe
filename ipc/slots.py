"""The life of one slot of shared tensor memory, as a table. Pure: knows no memory, no clock, no process.

A slot has one owner at any time. Its generation grows with each new write, so that a descriptor of an earlier
write can be told from the present one by comparison alone.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum

from ipc.errors import ProtocolError
from ipc.table import Table


class SlotState(StrEnum):
    FREE = "free"
    WRITING = "writing"
    PUBLISHED = "published"
    """Its descriptor was sent; the importer has not answered yet."""
    LEASED = "leased"
    """The importer reads it."""
    QUARANTINED = "quarantined"
    """The importer missed its deadline and may still read: not to be reused before its death is confirmed."""


class SlotEvent(StrEnum):
    ACQUIRED = "acquired"
    ABANDONED = "abandoned"
    PUBLISHED = "published"
    LEASED = "leased"
    RELEASED = "released"
    TIMED_OUT = "timed_out"
    PEER_DIED = "peer_died"


_S, _E = SlotState, SlotEvent

SLOT_TABLE: Table[SlotState, SlotEvent] = Table(
    "slot",
    {
        (_S.FREE, _E.ACQUIRED): _S.WRITING,
        (_S.WRITING, _E.ABANDONED): _S.FREE,
        (_S.WRITING, _E.PUBLISHED): _S.PUBLISHED,
        (_S.PUBLISHED, _E.LEASED): _S.LEASED,
        (_S.PUBLISHED, _E.RELEASED): _S.FREE,
        (_S.LEASED, _E.RELEASED): _S.FREE,
        (_S.PUBLISHED, _E.TIMED_OUT): _S.QUARANTINED,
        (_S.LEASED, _E.TIMED_OUT): _S.QUARANTINED,
        (_S.QUARANTINED, _E.RELEASED): _S.FREE,
        (_S.FREE, _E.PEER_DIED): _S.FREE,
        (_S.WRITING, _E.PEER_DIED): _S.WRITING,
        (_S.PUBLISHED, _E.PEER_DIED): _S.FREE,
        (_S.LEASED, _E.PEER_DIED): _S.FREE,
        (_S.QUARANTINED, _E.PEER_DIED): _S.FREE,
    },
)


class Slots:
    """A fixed number of slots. Events of a past generation are stale: refused, and counted by the caller."""

    def __init__(self, count: int) -> None:
        self._states = [SlotState.FREE] * count
        self._generations = [0] * count
        self._free = deque(range(count))  # who was free longest comes first, so that stale readers show

    def __len__(self) -> int:
        return len(self._states)

    @property
    def free(self) -> int:
        return len(self._free)

    def acquire(self) -> tuple[int, int] | None:
        """Index and new generation of a free slot to write, or None if all are taken."""
        if not self._free:
            return None
        index = self._free.popleft()
        self._states[index] = SLOT_TABLE.step(self._states[index], SlotEvent.ACQUIRED)
        self._generations[index] += 1
        return index, self._generations[index]

    def apply(self, index: int, generation: int, event: SlotEvent) -> None:
        """Raises ProtocolError for an unknown slot, a stale generation, or an event that is not legal now."""
        if not 0 <= index < len(self._states):
            raise ProtocolError(f"slot {index} does not exist; there are {len(self._states)}")
        if generation != self._generations[index]:
            raise ProtocolError(
                f"slot {index}: {event} of generation {generation}, now {self._generations[index]}"
            )
        self._step(index, event)

    def peer_died(self) -> list[int]:
        """The importer is gone for certain: all that it held is free again. Which those are."""
        held = [index for index, state in enumerate(self._states) if state in _HELD]
        for index in held:
            self._step(index, SlotEvent.PEER_DIED)
        return held

    def state(self, index: int) -> SlotState:
        return self._states[index]

    def count(self, state: SlotState) -> int:
        return self._states.count(state)

    def _step(self, index: int, event: SlotEvent) -> None:
        before = self._states[index]
        after = self._states[index] = SLOT_TABLE.step(before, event)
        if after is SlotState.FREE and before is not after:
            self._free.append(index)


_HELD = (SlotState.PUBLISHED, SlotState.LEASED, SlotState.QUARANTINED)
"""By the importer."""
