"""Branches in a speculator's memory: they stand in what sequences leave free, and leave nothing behind."""

from __future__ import annotations

import pytest
from confident import Confident

from ipc.messages import DraftedItem, DraftItem, LaneSpec, OpenedSequence, SamplingSpec
from workers.engines.toy import ToyEngine
from workers.speculator import SpeculatorLane
from workers.speculators.draft import DraftSpeculator

SAMPLED = SamplingSpec(0.9, 1.0, 0, 0.0, 1, 0, (), None)
K = 5
MANY = 64


class Lane:
    """Of a toy with so many blocks of 64 tokens."""

    def __init__(self, blocks: int, sequences: int = 4) -> None:
        model = "vocabulary=64,near=0.5,agree=0.7"
        self.engine = ToyEngine(LaneSpec("speculator", "toy", model, "fp32", "cpu", 1, sequences, 2048))
        self.engine.allocate(blocks * 64)
        self.lane = SpeculatorLane(DraftSpeculator(self.engine))

    @property
    def free(self) -> int:
        return self.engine.pool.available

    def open(self, seq: int, length: int) -> None:
        self.lane.open([OpenedSequence(seq, 0, [seq + 1] * length, length, SAMPLED)])

    def draft(self, *items: tuple[int, int], since: list[int] | None = None) -> list[list[int]]:
        """Of sequences by number and length."""
        asked = [DraftItem(seq, 0, length, since or [], K, hypotheses=MANY) for seq, length in items]
        return [item.tokens for item in self.lane.draft(asked)]

    def prepare(self, *items: tuple[int, int, list[int]], count: int = MANY) -> list[DraftedItem]:
        """Of sequences by number, length and draft."""
        asked = [
            DraftItem(seq, 0, length, [], K, ahead=ahead, hypotheses=count) for seq, length, ahead in items
        ]
        return self.lane.draft(asked)


def test_branches_give_way_to_sequences_that_come():
    lane = Lane(blocks=64)
    lane.open(0, 70)
    (ahead,) = lane.draft((0, 70))
    lane.prepare((0, 70, ahead))
    assert lane.free < 62 - 20
    lane.open(1, 1900)
    lane.open(2, 1800)
    assert [len(tokens) for tokens in lane.draft((1, 1900), (2, 1800))] == [K, K]
    assert lane.free == 64 - 2 - 30 - 29


def test_where_there_is_not_room_for_all_each_has_its_share():
    lane = Lane(blocks=50)
    for seq in range(4):
        lane.open(seq, 70)
    drafts = lane.draft(*((seq, 70) for seq in range(4)))
    prepared = lane.prepare(*((seq, 70, drafts[seq]) for seq in range(4)))
    counts = [len(item.prepared) for item in prepared]
    assert min(counts) >= 2
    assert max(counts) - min(counts) <= 1


def test_what_came_true_is_what_would_have_been_drafted_and_nothing_else_stays():
    lane = Lane(blocks=100)
    lane.open(0, 70)
    (ahead,) = lane.draft((0, 70))
    ((*_, prepared),) = [lane.prepare((0, 70, ahead))[0].prepared]
    news = [*ahead[: prepared.n_accepted], prepared.next_token]
    assert lane.draft((0, 70 + len(news)), since=news) == [prepared.tokens]
    assert lane.free == 100 - 2
    lane.lane.close([0])
    assert lane.free == 100


@pytest.mark.parametrize("news", [[63], [63, 62, 61]])
def test_a_verdict_that_nobody_guessed_leaves_nothing_behind(news):
    lane = Lane(blocks=100)
    lane.open(0, 70)
    (ahead,) = lane.draft((0, 70))
    lane.prepare((0, 70, ahead), count=3)
    lane.draft((0, 70 + len(news)), since=news)
    assert lane.free == 100 - 2


def test_one_that_is_closed_takes_its_branches_along():
    lane = Lane(blocks=100)
    lane.open(0, 70)
    (ahead,) = lane.draft((0, 70))
    lane.prepare((0, 70, ahead))
    lane.lane.close([0])
    assert lane.free == 100


def test_drafts_and_what_is_prepared_come_in_one_order_as_they_would_in_two():
    answers = []
    for together in (True, False):
        lane = Lane(blocks=200)
        lane.open(0, 70)
        lane.open(1, 70)
        (ahead,) = lane.draft((0, 70))
        waits = DraftItem(1, 0, 70, [], K, hypotheses=MANY)
        verified = DraftItem(0, 0, 70, [], K, ahead=ahead, hypotheses=3)
        orders = [[waits, verified]] if together else [[waits], [verified]]
        answers.append([item for order in orders for item in lane.lane.draft(order)])
    assert answers[0] == answers[1]
    assert len(answers[0][0].tokens) == K
    assert answers[0][1].prepared


def test_one_batch_of_both_takes_one_step_more_than_drafts_alone():
    lane = Lane(blocks=200)
    lane.open(0, 70)
    lane.open(1, 70)
    (ahead,) = lane.draft((0, 70))
    passes = []
    forward = lane.engine.forward
    lane.engine.forward = lambda windows: passes.append(len(windows)) or forward(windows)
    waits = DraftItem(1, 0, 70, [], K, hypotheses=MANY)
    verified = DraftItem(0, 0, 70, [], K, ahead=ahead, hypotheses=3)
    lane.lane.draft([waits, verified])
    assert passes == [1, 4, 4, 4, 4, 4]


def test_branches_leave_the_memory_that_drafts_beside_them_need():
    lane = Lane(blocks=27)
    lane.open(0, 60)
    (ahead,) = lane.draft((0, 60))
    lane.open(1, 518)
    waits = DraftItem(1, 0, 518, [], K, hypotheses=MANY)
    verified = DraftItem(0, 0, 60, [], K, ahead=ahead, hypotheses=MANY)
    drafted, _ = lane.lane.draft([waits, verified])
    assert len(drafted.tokens) == K


@pytest.mark.parametrize("hypotheses", [0, 1, MANY])
def test_one_that_drafts_worse_in_branches_says_how_good_each_draft_is(hypotheses):
    lane = Lane(blocks=64)
    lane.lane = SpeculatorLane(Confident(lane.engine))
    lane.open(0, 70)
    (fresh,) = lane.lane.draft([DraftItem(0, 0, 70, [], 3, hypotheses=hypotheses)])
    assert fresh.expected == (0.875 if hypotheses else None)
    if hypotheses:
        (answer,) = lane.prepare((0, 70, fresh.tokens), count=hypotheses)
        assert answer.prepared
        assert all(each.expected == 0.96875 for each in answer.prepared)


def test_nothing_is_said_of_guesses_that_are_drawn():
    """It would hang on what was drawn, and whether the draft is used would hang on that: see rejection.py."""
    lane = Lane(blocks=64)
    lane.lane = SpeculatorLane(Confident(lane.engine), None, "rejection")
    lane.open(0, 70)
    (fresh,) = lane.lane.draft([DraftItem(0, 0, 70, [], 3, hypotheses=MANY)])
    assert fresh.q
    assert fresh.expected is None
    (answer,) = lane.prepare((0, 70, fresh.tokens))
    assert answer.prepared
    assert all(each.expected is None for each in answer.prepared)


def test_one_that_drafts_alike_everywhere_says_nothing_of_it():
    lane = Lane(blocks=64)
    lane.open(0, 70)
    (ahead,) = lane.draft((0, 70))
    (answer,) = lane.prepare((0, 70, ahead))
    assert answer.prepared
    assert all(each.expected is None for each in answer.prepared)
