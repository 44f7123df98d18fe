"""Who needs what is in shared memory: against a plain model, slots are released once and never too soon."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from executor.leases import UNCLAIMED_SECONDS, Leases, arena_name, exporter_of
from ipc.messages import SlotRef

SECONDS = 10.0
ARENA = arena_name("t1", 0)
BORROWERS = ("s1", "s2")


def ref(slot: int, generation: int = 1, arena: str = ARENA) -> SlotRef:
    return SlotRef(arena, slot, generation)


def opened() -> Leases:
    leases = Leases(SECONDS)
    leases.opened(ARENA)
    return leases


def test_an_arena_tells_whose_it_is():
    assert exporter_of(ARENA) == "t1"
    assert arena_name("t1", 1) != ARENA


def test_kept_and_lent_is_released_when_both_are_over():
    leases = opened()
    leases.published([ref(0)], now=0)
    leases.keep(ref(0))
    leases.lend(ref(0), "s1", now=0)
    leases.drop(ref(0))
    assert leases.take_released("t1") == []
    leases.acked([ref(0)], "s2")  # to whom it was not lent
    assert leases.take_released("t1") == []
    leases.acked([ref(0)], "s1")
    assert leases.take_released("another") == []
    assert leases.take_released("t1") == [ref(0)]
    assert leases.take_released("t1") == []


def test_what_nobody_wanted_is_released_after_a_while():
    """Of a reply that came too late, for example."""
    leases = opened()
    leases.published([ref(0), ref(1)], now=5.0)
    leases.keep(ref(1))
    leases.look(5.0 + UNCLAIMED_SECONDS - 0.1)
    assert leases.take_released("t1") == []
    leases.look(5.0 + UNCLAIMED_SECONDS)
    assert leases.take_released("t1") == [ref(0)]


def test_a_late_borrower_is_quarantined_until_its_ack_or_its_death():
    leases = opened()
    for slot in range(3):
        leases.published([ref(slot)], now=0)
        leases.lend(ref(slot), "s1", now=0)
    assert leases.look(SECONDS - 0.1) == []
    assert leases.look(SECONDS) == [("s1", 3)]
    assert leases.look(2 * SECONDS) == []  # said once
    assert leases.count() == {"kept": 0, "lent": 0, "quarantined": 3}
    assert leases.take_released("t1") == []
    leases.acked([ref(0)], "s1")
    assert leases.take_released("t1") == [ref(0)]
    leases.died("s1")
    assert leases.take_released("t1") == [ref(1), ref(2)]
    assert leases.quarantines == 3


def test_a_hundred_loans_of_a_dead_lane_are_free_at_once():
    leases = opened()
    refs = [ref(slot) for slot in range(100)]
    leases.published(refs, now=0)
    for each in refs:
        leases.lend(each, "s1", now=0)
    leases.died("s2")
    assert leases.take_released("t1") == []
    leases.died("s1")
    assert leases.take_released("t1") == refs


def test_nothing_is_said_of_an_arena_that_is_gone():
    leases = opened()
    leases.published([ref(0), ref(1)], now=0)
    leases.keep(ref(0))
    leases.lend(ref(1), "s1", now=0)
    leases.gone(ARENA)
    assert not leases.knows(ARENA)
    leases.drop(ref(0))
    leases.acked([ref(1)], "s1")
    leases.died("s1")
    leases.look(1e9)
    leases.published([ref(5)], now=0)
    leases.keep(ref(5))
    assert leases.take_released("t1") == []
    assert leases.count() == {"kept": 0, "lent": 0, "quarantined": 0}


class LeaseLife(RuleBasedStateMachine):
    """The model: for each slot its keepers, borrowers, and until when it is unclaimed."""

    def __init__(self) -> None:
        super().__init__()
        self.leases = opened()
        self.now = 0.0
        self.generation = [0] * 3
        self.keepers = [0] * 3
        self.borrowers: list[set[str]] = [set(), set(), set()]
        self.unclaimed: list[float | None] = [None] * 3
        self.held = [False] * 3
        self.due: list[SlotRef] = []

    def now_ref(self, slot: int) -> SlotRef:
        return ref(slot, self.generation[slot])

    def settle(self, slot: int) -> None:
        needed = self.keepers[slot] or self.borrowers[slot] or self.unclaimed[slot] is not None
        if self.held[slot] and not needed:
            self.held[slot] = False
            self.due.append(self.now_ref(slot))

    @rule(slot=st.integers(0, 2))
    def publish(self, slot):
        if not self.held[slot] and self.now_ref(slot) not in self.due:
            self.generation[slot] += 1
            self.leases.published([self.now_ref(slot)], self.now)
            self.held[slot], self.unclaimed[slot] = True, self.now + UNCLAIMED_SECONDS

    @rule(slot=st.integers(0, 2))
    def keep(self, slot):
        self.leases.keep(self.now_ref(slot))
        if self.held[slot]:
            self.keepers[slot], self.unclaimed[slot] = self.keepers[slot] + 1, None

    @rule(slot=st.integers(0, 2))
    def drop(self, slot):
        if self.keepers[slot]:
            self.leases.drop(self.now_ref(slot))
            self.keepers[slot] -= 1
            self.settle(slot)

    @rule(slot=st.integers(0, 2), borrower=st.sampled_from(BORROWERS))
    def lend(self, slot, borrower):
        self.leases.lend(self.now_ref(slot), borrower, self.now)
        if self.held[slot]:
            self.borrowers[slot].add(borrower)
            self.unclaimed[slot] = None

    @rule(slot=st.integers(0, 2), borrower=st.sampled_from(BORROWERS), lag=st.integers(0, 1))
    def ack(self, slot, borrower, lag):
        self.leases.acked([ref(slot, self.generation[slot] - lag)], borrower)
        if lag == 0:
            self.borrowers[slot].discard(borrower)
            self.settle(slot)

    @rule(borrower=st.sampled_from(BORROWERS))
    def die(self, borrower):
        self.leases.died(borrower)
        for slot in range(3):
            self.borrowers[slot].discard(borrower)
            self.settle(slot)

    @rule(seconds=st.sampled_from([1.0, SECONDS, UNCLAIMED_SECONDS]))
    def time_passes(self, seconds):
        self.now += seconds
        self.leases.look(self.now)
        for slot, until in enumerate(self.unclaimed):
            if until is not None and self.now >= until:
                self.unclaimed[slot] = None
                self.settle(slot)

    @rule()
    def take(self):
        assert set(self.leases.take_released("t1")) == set(self.due)
        self.due = []

    @invariant()
    def counts_agree(self):
        count = self.leases.count()
        assert count["kept"] == sum(bool(keepers) for keepers in self.keepers)
        assert count["lent"] + count["quarantined"] == sum(map(len, self.borrowers))


LeaseLife.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, derandomize=True, deadline=None
)
TestLeaseLife = LeaseLife.TestCase
