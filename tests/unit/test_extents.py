"""Which bytes of an arena are taken, against a plain model: no two share a byte, and gaps close again."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ipc.descriptor import ALIGNMENT
from ipc.extents import Extents

UNITS = 12
NBYTES = UNITS * ALIGNMENT + 17


def test_all_of_it_can_be_taken_and_is_one_piece_again():
    extents = Extents(NBYTES)
    offsets = [extents.take(ALIGNMENT) for _ in range(UNITS)]
    assert offsets == [ALIGNMENT * i for i in range(UNITS)]
    assert extents.take(1) is None
    for offset in offsets[1::2] + offsets[::2]:
        extents.give(offset)
    assert extents.take(UNITS * ALIGNMENT) == 0


@pytest.mark.parametrize("offset", [0, 1, ALIGNMENT])
def test_what_was_not_taken_cannot_be_given(offset):
    with pytest.raises(KeyError):
        Extents(NBYTES).give(offset)


class ExtentLife(RuleBasedStateMachine):
    """The model is a list of units, each with its owner."""

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents(NBYTES)
        self.owners: list[int | None] = [None] * UNITS

    @rule(nbytes=st.integers(0, 5 * ALIGNMENT))
    def take(self, nbytes):
        units = max(1, -(-nbytes // ALIGNMENT))
        fits = any(self.owners[i : i + units] == [None] * units for i in range(UNITS - units + 1))
        offset = self.extents.take(nbytes)
        assert (offset is not None) is fits
        if offset is not None:
            assert offset % ALIGNMENT == 0
            first = offset // ALIGNMENT
            assert self.owners[first : first + units] == [None] * units
            self.owners[first : first + units] = [offset] * units

    @precondition(lambda self: any(owner is not None for owner in self.owners))
    @rule(data=st.data())
    def give(self, data):
        offset = data.draw(st.sampled_from(sorted({owner for owner in self.owners if owner is not None})))
        self.extents.give(offset)
        self.owners = [None if owner == offset else owner for owner in self.owners]

    @invariant()
    def as_much_is_free(self):
        assert self.extents.free == self.owners.count(None) * ALIGNMENT


ExtentLife.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, derandomize=True, deadline=None
)
TestExtentLife = ExtentLife.TestCase
