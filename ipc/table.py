"""State machines as tables: a missing row is an error that names the state and the event."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

from ipc.errors import ProtocolError

State = TypeVar("State", bound=Hashable)
Event = TypeVar("Event", bound=Hashable)


class Table(Generic[State, Event]):
    """All legal transitions of one machine; holds no state itself."""

    def __init__(self, name: str, rows: Mapping[tuple[State, Event], State]) -> None:
        self.name = name
        self.rows = dict(rows)

    def step(self, state: State, event: Event) -> State:
        """The state after `event`. Raises ProtocolError if the table has no such row."""
        try:
            return self.rows[state, event]
        except KeyError:
            raise ProtocolError(f"{self.name}: {event} is not legal in state {state}") from None
