"""Slots against a plain model: one owner each, and stale generations are refused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ipc.errors import ProtocolError
from ipc.slots import SLOT_TABLE, SlotEvent, Slots, SlotState

COUNT = 3
_S, _E = SlotState, SlotEvent
HELD_BY_THE_IMPORTER = {_S.PUBLISHED, _S.LEASED, _S.QUARANTINED}


def test_every_state_can_become_free_again():
    reaching = {_S.FREE}
    while grown := {state for (state, _), after in SLOT_TABLE.rows.items() if after in reaching} - reaching:
        reaching |= grown
    assert reaching == set(SlotState)


def test_only_the_death_of_the_importer_or_its_own_word_takes_a_slot_from_it():
    for (state, event), after in SLOT_TABLE.rows.items():
        if state in HELD_BY_THE_IMPORTER and after not in HELD_BY_THE_IMPORTER:
            assert event in (_E.RELEASED, _E.PEER_DIED), (state, event)


@pytest.mark.parametrize(("state", "event"), [(s, e) for s in SlotState for e in SlotEvent])
def test_what_is_not_in_the_table_is_refused_by_name(state, event):
    if (state, event) not in SLOT_TABLE.rows:
        with pytest.raises(ProtocolError, match=f"slot: {event} is not legal in state {state}"):
            SLOT_TABLE.step(state, event)


def test_slots_that_do_not_exist():
    slots = Slots(COUNT)
    for index in (-1, COUNT):
        with pytest.raises(ProtocolError, match=f"slot {index} does not exist; there are 3"):
            slots.apply(index, 0, _E.PUBLISHED)


class SlotLife(RuleBasedStateMachine):
    """The model keeps, per slot, its owner and generation."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(COUNT)
        self.owner = ["nobody"] * COUNT
        self.state = [_S.FREE] * COUNT
        self.generation = [0] * COUNT

    @rule()
    def acquire(self):
        taken = self.slots.acquire()
        if "nobody" not in self.owner:
            assert taken is None
            return
        assert taken is not None
        index, generation = taken
        assert self.owner[index] == "nobody"
        self.generation[index] += 1
        assert generation == self.generation[index]
        self.owner[index], self.state[index] = "writer", _S.WRITING

    @rule(index=st.integers(0, COUNT - 1), event=st.sampled_from(SlotEvent), lag=st.integers(0, 2))
    def apply(self, index, event, lag):
        """An event about the present write, or one about an earlier."""
        legal = lag == 0 and event is not _E.ACQUIRED and (self.state[index], event) in SLOT_TABLE.rows
        if event is _E.ACQUIRED or (lag and self.generation[index] < lag):
            return
        before = self.slots.state(index)
        if not legal:
            with pytest.raises(ProtocolError):
                self.slots.apply(index, self.generation[index] - lag, event)
            assert self.slots.state(index) is before
            return
        self.slots.apply(index, self.generation[index], event)
        self.state[index] = self.slots.state(index)
        self.owner[index] = self._owner(self.state[index])

    @rule()
    def peer_died(self):
        self.slots.peer_died()
        for index, owner in enumerate(self.owner):
            if owner == "importer":
                self.owner[index], self.state[index] = "nobody", _S.FREE

    @invariant()
    def owners_agree(self):
        assert [self._owner(self.slots.state(i)) for i in range(COUNT)] == self.owner

    @staticmethod
    def _owner(state: SlotState) -> str:
        return {_S.FREE: "nobody", _S.WRITING: "writer"}.get(state, "importer")


SlotLife.TestCase.settings = settings(
    max_examples=80, stateful_step_count=30, derandomize=True, deadline=None
)
TestSlotLife = SlotLife.TestCase
