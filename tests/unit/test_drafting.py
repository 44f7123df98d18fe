"""The draft step against a speculator that says what the test wants: what it is told, what is believed."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
from letters import request

from executor.config import Timeouts
from executor.drafting import CATCH_UP_TOKENS, DRAFT_STRIKES, PREPARE_NEWS, Drafting
from executor.lane import Lane, LaneEvent, LaneState
from executor.lanes import WireCounts
from executor.plan import Step
from executor.request import Guesses
from executor.stats import Stats
from ipc import q_rows
from ipc.link import LinkState
from ipc.messages import Cancel, Draft, Drafted, DraftedItem, DraftItem, LaneSpec, Open, Ready, Vocabulary

SIZE = 100
TIMEOUTS = Timeouts(draft=1.0, draft_least=0.001)


def honest(item: DraftItem) -> DraftedItem:
    return DraftedItem(item.seq, item.gen, item.base_len, [1] * item.k)


class NoReply(NamedTuple):
    """`timeout`, or `down`: the speculator died instead."""

    reason: str


class FakeLanes:
    """One speculator, kept by hand. `answer`: how to answer an item, or why there is no answer; `deadly`: the
    one sequence that is not answered, else all are."""

    def __init__(self) -> None:
        self.counts = WireCounts()
        self.sent: list[Any] = []
        self.answer: Any = None
        self.deadly: int | None = None
        self.clock = 0.0
        self.patience: list[float] = []
        self.restart()

    def restart(self) -> None:
        self.speculator = Lane(LaneSpec("speculator", "toy", "", "fp32", "cpu", 1, 16, 4096))
        self.speculator.step(LaneEvent.READY)
        self.speculator.link.state = LinkState.IDLE
        self.speculator.ready = Ready(self.speculator.epoch, Vocabulary(SIZE, ""), 4096, [])

    def die(self) -> None:
        self.speculator.step(LaneEvent.ENDED)
        self.restart()

    def now(self) -> float:
        return self.clock

    def tell(self, lane: Lane, order: Any) -> None:
        lane.link.passed(order)
        self.sent.append(order)

    def ask(self, lane: Lane, order: Draft) -> None:
        """Answered at once, if it is answered."""
        lane.in_flight, lane.reply = order.order, None
        lane.asked_at = self.clock
        self.tell(lane, order)
        silent = self.deadly is None or self.deadly in [item.seq for item in order.items]
        if isinstance(self.answer, NoReply) and silent:
            if self.answer.reason == "down":
                self.die()
            return
        if all(item.k for item in order.items):
            self.answered()

    def answered(self, after: float = 0.1) -> None:
        """The speculator answers its last order."""
        lane, order = self.speculator, self.orders()[-1]
        make = self.answer if callable(self.answer) else honest
        self.clock += after
        lane.answered_at = self.clock
        lane.reply = Drafted(lane.epoch, order.order, [make(item) for item in order.items], 7)
        lane.in_flight = None
        lane.link.state = LinkState.IDLE

    def take(self, lane: Lane) -> Drafted | None:
        fact, lane.reply = lane.reply, None
        return fact

    def orders(self) -> list[Draft]:
        return [order for order in self.sent if isinstance(order, Draft)]


class Bench:
    """Drafting with fake lanes, of requests numbered in order."""

    def __init__(self, *lengths: int) -> None:
        self.lanes = FakeLanes()
        self.stats = Stats()
        self.drafting = Drafting(self.lanes, TIMEOUTS, self.stats)  # type: ignore[arg-type]
        self.requests = [request([2] * length, max_tokens=500) for length in lengths]
        for seq, its in enumerate(self.requests):
            its.seq = seq

    def run(self, k: int = 3) -> dict[int, list[int]]:
        """What a round finds drafted, for sequences that have no draft yet."""
        self.drafting.collect(SIZE)
        for its in self.requests:
            its.draft, its.asked_len = None, 0
        plan = [Step(its, k if its.speculate else 0) for its in self.requests]
        if self.drafting.free:
            began = self.lanes.now()
            self.drafting.ask(plan, 0, None)
            self.lanes.patience.append(self.drafting.waited_until - began)
            self.drafting.collect(SIZE)
        return {its.seq: its.draft.tokens for its in self.requests if its.draft is not None}

    def asked(self) -> list[int]:
        """The sequences of the last order."""
        return [item.seq for item in self.lanes.orders()[-1].items]


def test_a_sequence_is_opened_once_and_then_told_its_news():
    bench = Bench(4)
    assert bench.run() == {0: [1, 1, 1]}
    bench.requests[0].tokens += [5, 6]
    bench.run()
    opened, first, second = bench.lanes.sent
    assert isinstance(opened, Open)
    assert opened.sequences[0].tokens == [2, 2, 2, 2]
    assert [(item.base_len, item.since) for item in (*first.items, *second.items)] == [(4, []), (6, [5, 6])]


def test_one_that_was_started_again_is_told_everything():
    bench = Bench(4)
    bench.run()
    bench.requests[0].tokens += [5]
    bench.lanes.die()
    assert bench.run() == {0: [1, 1, 1]}
    assert bench.lanes.sent[-2].sequences[0].tokens == [2, 2, 2, 2, 5]
    assert bench.requests[0].draft_strikes == 0  # it owed nothing when it died


def test_a_long_backlog_is_told_in_parts_while_rounds_go_on():
    bench = Bench(300, 900, 5)
    while not bench.run():
        assert bench.drafting.waited_until == 0.0
        assert all(item.k == 0 for item in bench.lanes.orders()[-1].items)
        bench.lanes.answered()
        bench.requests[0].tokens.append(3)  # the target goes on meanwhile
    assert bench.stats.catch_ups == len(bench.lanes.orders()) - 1 == 2
    assert bench.asked() == [0, 1, 2]
    assert bench.stats.missed == 0
    last = {item.seq: item.base_len for item in bench.lanes.orders()[-1].items}
    assert last == {seq: len(its.tokens) for seq, its in enumerate(bench.requests)}


def test_no_part_is_longer_than_the_bound():
    bench = Bench(700, 700, 700)
    before = 0
    while not bench.run():
        bench.lanes.answered()
        now = sum(bench.lanes.speculator.told.values())
        assert now - before <= CATCH_UP_TOKENS + 3  # and what a verdict brings to each
        before = now
    assert bench.stats.catch_ups == 4  # 2100 tokens, of which at most 512 may come with the last order


def test_the_wait_follows_how_long_drafts_take():
    bench = Bench(4)
    bench.run()
    assert bench.lanes.patience.pop() == pytest.approx(TIMEOUTS.draft, abs=0.1)
    for _ in range(100):
        bench.run()
    assert bench.lanes.patience.pop() == pytest.approx(0.2, abs=0.05)  # drafts take 0.1 s each
    bench.lanes.die()
    bench.run()
    assert bench.lanes.patience.pop() < 0.4  # one that starts again is not unknown
    bench.lanes.answer = NoReply("timeout")
    bench.run()
    before = bench.lanes.patience.pop()
    bench.lanes.answered(after=60.0)  # late replies are learned from, within bounds
    bench.lanes.answer = None
    bench.run()
    assert before < bench.lanes.patience.pop() < 3 * before
    bench.lanes.speculator.spec = msgspec.structs.replace(bench.lanes.speculator.spec, model="another")
    bench.run()
    assert bench.lanes.patience.pop() == pytest.approx(TIMEOUTS.draft, abs=0.1)


def test_a_busy_speculator_is_not_asked():
    bench = Bench(4)
    bench.lanes.answer = NoReply("timeout")
    assert bench.run() == bench.run() == {}
    assert len(bench.lanes.orders()) == 1
    bench.lanes.answered()
    bench.lanes.answer = None
    assert bench.run() == {0: [1, 1, 1]}
    assert bench.requests[0].draft_strikes == 0


@pytest.mark.parametrize("reason", ["down", "timeout"])
def test_suspects_are_drafted_for_alone_and_the_guilty_one_is_quarantined(reason):
    """Sequence 1 is its death, at once or by a hang that is ended when nobody waits any more."""
    bench = Bench(4, 4, 4)
    bench.lanes.deadly, bench.lanes.answer = 1, NoReply(reason)
    for _ in range(9):
        bench.run()
        if bench.lanes.speculator.in_flight is not None:
            bench.lanes.speculator.step(LaneEvent.CONDEMN)
            bench.run()
            bench.lanes.die()
    asked = [[item.seq for item in order.items] for order in bench.lanes.orders()]
    assert asked[:7] == [[0, 1, 2], [0], [1], [2], [1], [0, 2], [0, 2]]
    assert [its.speculate for its in bench.requests] == [True, False, True]
    assert (bench.stats.quarantined, DRAFT_STRIKES) == (1, 3)


def test_an_answer_ends_a_row_of_deaths():
    bench = Bench(4)
    for _ in range(5):
        for _ in range(DRAFT_STRIKES - 1):
            bench.lanes.answer = NoReply("down")
            bench.run()
        bench.lanes.answer = None
        assert bench.run() == {0: [1, 1, 1]}
    assert bench.stats.quarantined == 0


def test_one_that_is_let_go_while_it_owes_an_answer_is_no_strike():
    bench = Bench(4)
    bench.lanes.answer = NoReply("timeout")
    bench.run()
    gone = bench.lanes.speculator
    gone.step(LaneEvent.STOP)
    gone.link.state = LinkState.STOPPING
    bench.lanes.die()
    bench.lanes.answer = None
    assert bench.run() == {0: [1, 1, 1]}
    assert gone.state is LaneState.DOWN
    assert bench.requests[0].draft_strikes == 0


@pytest.mark.parametrize(
    ("made", "counted"),
    [
        (lambda item: msgspec.structs.replace(honest(item), expected=3.5), "invalid"),
        (lambda item: msgspec.structs.replace(honest(item), expected=float("nan")), "invalid"),
        (lambda item: DraftedItem(item.seq, item.gen, item.base_len, [1] * (item.k + 1)), "invalid"),
        (lambda item: DraftedItem(item.seq, item.gen, item.base_len, [SIZE]), "invalid"),
        (lambda item: DraftedItem(item.seq, item.gen, item.base_len, [-1]), "invalid"),
        (lambda item: DraftedItem(item.seq, item.gen, item.base_len, [], broken=True), "broken"),
        (lambda item: DraftedItem(item.seq, item.gen + 1, item.base_len, [1]), "stale"),
        (lambda item: DraftedItem(item.seq, item.gen, item.base_len + 1, [1]), "stale"),
        (lambda item: DraftedItem(item.seq + 9, item.gen, item.base_len, [1]), "stale"),
    ],
)
def test_what_cannot_be_believed(made, counted):
    bench = Bench(4)
    bench.lanes.answer = made
    assert bench.run() == {}
    stats = bench.stats
    counts = {"invalid": stats.invalid, "broken": stats.broken, "stale": bench.lanes.counts.stale}
    assert counts == {"invalid": 0, "broken": 0, "stale": 0} | {counted: 1}
    assert bench.requests[0].speculate == (counted == "stale")


ROW = q_rows.pack([1, 5], [0.5, 0.5])


@pytest.mark.parametrize(
    ("acceptance", "q", "used"),
    [
        ("rejection", [ROW, ROW, ROW], [ROW, ROW]),
        ("block", [ROW, q_rows.LOOKED_UP, ROW], [ROW, q_rows.LOOKED_UP]),
        ("rejection", [], []),
        ("coupled", [], []),
        ("coupled", [ROW, ROW, ROW], None),
        ("rejection", [ROW, ROW], None),
        ("rejection", [ROW, q_rows.pack([2, 5], [0.5, 0.5]), ROW], None),
        ("rejection", [ROW, ROW, q_rows.pack([1, SIZE], [0.5, 0.5])], None),
    ],
)
def test_rows_that_drafts_were_drawn_from(acceptance, q, used):
    """They are cut with the draft; one that cannot be ends the drafts of the sequence."""
    bench = Bench(4)
    speculator = bench.lanes.speculator
    speculator.spec = msgspec.structs.replace(speculator.spec, acceptance=acceptance)
    bench.lanes.answer = lambda item: DraftedItem(item.seq, 0, item.base_len, [1] * 3, worth=2, q=q)
    bench.run()
    assert bench.requests[0].draft == (None if used is None else Guesses([1, 1], used))
    assert bench.stats.invalid == bench.stats.quarantined == (used is None)


def prepared(bench: Bench) -> list[int]:
    """The sequences for which drafts are prepared while their own are verified."""
    for its in bench.requests:
        its.draft, its.prepared_len = Guesses([1, 1], []), 0
    bench.lanes.answer = NoReply("timeout")
    before = len(bench.lanes.orders())
    bench.drafting.prepare([Step(its, 3) for its in bench.requests], 2)
    return bench.asked() if len(bench.lanes.orders()) > before else []


def test_drafts_are_prepared_only_where_little_is_news():
    """Each branch would have to read it."""
    bench = Bench(4, 4, 4)
    bench.run()
    bench.requests[1].tokens += [2] * PREPARE_NEWS
    bench.requests[2].tokens += [2] * (PREPARE_NEWS + 1)
    assert prepared(bench) == [0, 1]


def test_what_is_prepared_for_sequences_that_have_ended_is_not_waited_for():
    bench = Bench(4, 4)
    bench.run()
    assert prepared(bench) == [0, 1]
    for its in bench.requests:
        its.finish_reason = "length"
    bench.drafting.verdict_given(bench.requests, hurry=False)
    assert bench.drafting.waited_until == 0.0
    assert isinstance(bench.lanes.sent[-1], Cancel)


@pytest.mark.parametrize("hurry", [False, True])
def test_what_is_prepared_for_one_that_goes_on_is_waited_for(hurry):
    bench = Bench(4, 4)
    bench.run()
    prepared(bench)
    bench.requests[0].finish_reason = "length"
    bench.drafting.verdict_given(bench.requests, hurry=hurry)
    assert bench.drafting.waited_until > 0.0
    assert isinstance(bench.lanes.sent[-1], Cancel) == hurry


def test_a_draft_for_one_that_was_cancelled_meanwhile_is_given_back():
    bench = Bench(4)
    bench.lanes.answer = NoReply("timeout")
    bench.run()
    bench.requests[0].draft, bench.requests[0].finish_reason = None, "cancelled"
    bench.lanes.answer = None
    bench.lanes.answered()
    bench.drafting.collect(SIZE)
    assert bench.requests[0].draft is None
    assert bench.lanes.counts.stale == 1


def test_without_a_speculator_or_anything_to_draft():
    bench = Bench(4)
    assert bench.run(k=0) == {}
    bench.lanes.speculator = None  # type: ignore[assignment]
    assert bench.run() == {}
    assert bench.lanes.sent == []


def test_a_draft_that_is_late_is_not_cut_short_by_a_verdict():
    bench = Bench(4)
    bench.lanes.answer = NoReply("timeout")
    bench.run()
    bench.drafting.verdict_given(bench.requests, hurry=True)
    assert not any(isinstance(order, Cancel) for order in bench.lanes.sent)


def test_what_is_asked_beside_drafts_is_cut_short_once():
    bench = Bench(4, 4)
    bench.run()
    waits, verified = bench.requests
    verified.draft, verified.prepared_len, waits.draft, waits.asked_len = Guesses([1, 1], []), 0, None, 0
    bench.lanes.answer = NoReply("timeout")
    bench.drafting.ask([Step(waits, 3)], 2, None, [Step(verified, 3)])
    assert [(item.seq, item.ahead) for item in bench.lanes.orders()[-1].items] == [(0, []), (1, [1, 1])]
    bench.drafting.verdict_given([verified], hurry=False)
    for _ in range(2):
        bench.drafting.verdict_given([verified], hurry=True)
    assert [type(order) for order in bench.lanes.sent].count(Cancel) == 1


def test_waiting_in_vain_is_waiting():
    bench = Bench(4)
    bench.run()
    bench.drafting.wait_since(0.0)
    bench.lanes.answer = NoReply("timeout")
    bench.run()
    asked = bench.lanes.now()
    bench.lanes.clock = bench.drafting.waited_until + 5.0
    assert bench.drafting.wait_since(0.0) == (0.0, pytest.approx(bench.drafting.waited_until - asked))


def test_what_verdicts_bring_is_no_backlog_and_a_newcomer_is_read_whoever_else_has_news():
    bench = Bench(*[10] * 200)
    while not bench.run():
        bench.lanes.answered()
    for its in bench.requests:
        its.tokens.append(3)
    before = bench.stats.catch_ups
    assert len(bench.run()) == 200
    assert bench.stats.catch_ups == before
    late = request([2] * 1000, max_tokens=500)
    late.seq = 200
    bench.requests.append(late)
    for its in bench.requests[:200]:
        its.tokens.append(3)
    assert not bench.run()
    assert bench.lanes.orders()[-1].items[-1].base_len == CATCH_UP_TOKENS + 1


def drafted_as(expected: float | None):
    return lambda item: msgspec.structs.replace(honest(item), expected=expected)


def test_a_prepared_draft_that_is_much_worse_than_another_is_not_used_where_waiting_is_cheap():
    bench = Bench(4)
    enough = bench.drafting.good_enough
    assert enough(Guesses([1], [], 0.1, 3), price=0.0)  # nothing is known of others
    bench.lanes.answer = drafted_as(1.5)
    bench.run(k=3)
    assert enough(Guesses([1], [], 1.2, 3), price=0.4)
    assert not enough(Guesses([1], [], 1.0, 3), price=0.4)
    assert enough(Guesses([1], [], 1.0, 3), price=0.6)
    assert enough(Guesses([1], [], 1.0, 2), price=0.0)  # others of that length were not seen yet
    assert enough(Guesses([1], [], None, 3), price=0.0)  # its speculator drafts as well in either way
    bench.lanes.answer = NoReply("timeout")
    bench.run(k=3)
    assert enough(Guesses([1], [], 1.0, 3), price=0.0)  # nobody is there to make another
