"""The draft speculator when logits are no numbers: who is affected, and who is not."""

from __future__ import annotations

import logging

import pytest

from ipc import q_rows
from ipc.arena import SLOTS, Arena
from ipc.messages import DraftItem, LaneSpec, OpenedSequence, SamplingSpec
from ipc.slots import SlotState
from workers.engines.toy import ToyEngine
from workers.sequence import LaneSequence
from workers.speculator import Ask, SpeculatorLane
from workers.speculators.draft import DraftSpeculator

SPEC = LaneSpec("speculator", "toy", "vocabulary=32", "fp32", "cpu", 1, 8, 256)


SAMPLING = SamplingSpec(0.9, 1.0, 0, 0.0, 0, 0, (), None)


class FaultyToy(ToyEngine):
    """Its logits are no numbers in each row for which `faulty` says so, by draw."""

    def __init__(self, faulty):
        super().__init__(SPEC)
        self.faulty = faulty

    def sample(self, rows, draws):
        for row, draw in enumerate(draws):
            if self.faulty(draw):
                raise FloatingPointError(f"row {row}: no token can be sampled")
        return super().sample(rows, draws)


def sequence(seq: int) -> LaneSequence:
    sampling = SamplingSpec(0.9, 1.0, 0, 0.0, seq, 0, (), None)
    return LaneSequence(OpenedSequence(seq, 0, [seq, 1, 2, 3], 4, sampling))


def speculator(faulty=lambda draw: False):
    sequences = [sequence(seq) for seq in range(3)]
    made = DraftSpeculator(FaultyToy(faulty))
    for each in sequences:
        made.open(each)
    return made, [Ask(each, 4) for each in sequences]


def test_only_the_sequence_concerned_has_no_proposal(caplog):
    sound, asks = speculator()
    expected = sound.propose(asks)
    assert [len(tokens) for tokens in expected] == [4, 4, 4]
    for bad in (1, 4), (1, 6):  # in the first step, and after two tokens
        made, asks = speculator(lambda draw, bad=bad: (draw.sampling.seed, draw.position) == bad)
        with caplog.at_level(logging.WARNING, logger="speclane"):
            assert made.propose(asks) == [expected[0], None, expected[2]]
    assert [record.getMessage() for record in caplog.records] == [
        "sequence 1: row 0: no token can be sampled"
    ] * 2


def test_its_number_is_free_for_another_sequence():
    seen: list[int] = []
    made, asks = speculator(lambda draw: draw.sampling.seed == 1 and not seen)
    assert made.propose(asks)[1] is None
    seen.append(1)
    made.close(asks[1].sequence)
    again = sequence(1)
    made.open(again)
    assert len(made.propose([Ask(again, 4)])[0]) == 4


def test_an_order_of_nobody():
    assert speculator()[0].propose([]) == []


@pytest.mark.parametrize("everyone", [1, 3])
def test_all_concerned(everyone):
    made, asks = speculator(lambda draw: True)
    assert made.propose(asks[:everyone]) == [None] * everyone


def test_confidences_are_the_probabilities_of_the_guesses_and_change_none():
    made, asks = speculator()
    wanted = [ask._replace(confidences=[]) for ask in asks]
    proposals = made.propose(wanted)
    other, unasked = speculator()
    assert proposals == other.propose(unasked)
    engine = ToyEngine(SPEC)
    for ask, tokens in zip(wanted, proposals, strict=True):
        history = list(ask.sequence.tokens)
        for token, chance in zip(tokens, ask.confidences, strict=True):
            assert chance == engine.exact_probabilities(history, 1.0)[token]
            history.append(token)


def test_a_lane_says_what_is_worth_verifying_only_where_not_all_can_be():
    lane = SpeculatorLane(DraftSpeculator(ToyEngine(SPEC)))
    lane.open([OpenedSequence(seq, 0, [seq, 1], 2, SAMPLING) for seq in range(3)])
    items = [DraftItem(seq, 0, 2, [], 4) for seq in range(3)]
    ample, scarce = lane.draft(items, 12), lane.draft(items, 5)
    assert [item.worth for item in ample] == [None] * 3
    assert [item.tokens for item in ample] == [item.tokens for item in scarce]
    assert sum(item.worth for item in scarce) == 5
    assert [item.worth for item in lane.draft(items)] == [None] * 3


def test_the_rows_of_a_draft_that_broke_off_are_let_go(monkeypatch):
    """Nobody hears of them, so nobody else could say that they may be written over."""
    monkeypatch.setattr(q_rows, "ARENA_ROW_BYTES", 1)

    class LateFault(ToyEngine):
        def distribution(self, rows, index, draw):
            if draw.position > 3:
                raise FloatingPointError("no token can be sampled")
            return super().distribution(rows, index, draw)

    lane = SpeculatorLane(DraftSpeculator(LateFault(SPEC)), acceptance="rejection", q_form="full")
    arena = lane.plane._arenas["s/0"] = Arena("s/0", "s", 1 << 16, "memfd")
    lane.open([OpenedSequence(0, 0, [0, 1], 2, SAMPLING)])
    ((item,), (broken,)) = (lane.draft([DraftItem(0, 0, 2, [], k)], arena="s/0") for k in (2, 4))
    assert (len(item.q), item.broken) == (2, False)
    assert broken.broken
    assert arena.count(SlotState.PUBLISHED) == 2
    arena.release([row.at.ref for row in item.q])
    assert arena.count(SlotState.FREE) == SLOTS
    lane.plane.close()
