"""One client of a speculator server: its numbers are its own, and nothing of it can end the lane."""

from __future__ import annotations

import itertools
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.admission import KvRoom
from executor.pool.client import Client, Overdrawn, Terms
from ipc.errors import ProtocolError
from ipc.messages import (
    Allocate,
    Configure,
    ConstraintSpec,
    Descriptor,
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    HiddenRows,
    LaneSpec,
    OpenedSequence,
    SamplingSpec,
)
from workers.lane import SequenceTable

GREEDY = SamplingSpec(0.0, 1.0, 0, 0.0, 1, 0, (), None)
NO_CONSTRAINTS = ConstraintSpec(0.0, 0.0, 1.0, (), (), (), "", ())
TERMS = Terms(seats=2, max_model_len=200, room=KvRoom(256, 64), k=5, vocabulary=100, row_bytes=0)


def client(terms: Terms = TERMS) -> Client:
    made = Client("speculator/e", "e", "a")
    made.admit(terms)
    return made


def opened(seq: int, tokens=(1, 2, 3), gen: int = 0, sampling: SamplingSpec = GREEDY) -> OpenedSequence:
    return OpenedSequence(seq, gen, list(tokens), 1, sampling)


def item(seq: int, base_len: int, since=(), k: int = 2, gen: int = 0, rows=()) -> DraftItem:
    return DraftItem(seq, gen, base_len, list(since), k, list(rows))


def draft(*items: DraftItem, budget: int | None = None) -> Draft:
    return Draft("e", 7, list(items), budget)


def test_sequences_of_two_clients_have_numbers_of_their_own():
    numbers = itertools.count()
    a, b = client(), client()
    for each in (a, b):
        each.open([opened(0), opened(1)], numbers)
        each.ask(draft(item(0, 4, [9]), item(1, 3)))
    (a_opened, a_items), (b_opened, b_items) = a.take(), b.take()
    assert [one.seq for one in (*a_opened, *b_opened)] == [0, 1, 2, 3]
    assert [one.seq for one in (*a_items, *b_items)] == [0, 1, 2, 3]
    lane = Drafted("x", 1, [DraftedItem(seq, 0, 3, [seq]) for seq in range(4)], 0)
    assert a.its(lane) == [DraftedItem(0, 0, 3, [0]), DraftedItem(1, 0, 3, [1])]
    assert b.its(lane) == [DraftedItem(0, 0, 3, [2]), DraftedItem(1, 0, 3, [3])]


def test_the_lane_is_told_once_and_hears_only_of_what_it_was_told():
    numbers, a = itertools.count(), client()
    a.open([opened(0)], numbers)
    a.ask(draft(item(0, 3)))
    assert [one.tokens for one in a.take()[0]] == [[1, 2, 3]]
    a.ask(draft(item(0, 5, [4, 5])))
    assert a.take()[0] == []
    a.open([opened(1)], numbers)
    a.close([1])
    assert a.closing == []
    a.close([0])
    assert a.closing == [0]


def test_what_is_closed_while_its_order_waits_is_left_out():
    numbers, a = itertools.count(), client()
    a.open([opened(0), opened(1)], numbers)
    a.ask(draft(item(0, 3), item(1, 3)))
    a.close([0])
    assert [one.seq for one in a.take()[1]] == [1]
    a.ask(draft(item(1, 3)))
    a.close([1])
    a.open([opened(1, gen=1)], numbers)
    assert a.bid(alone=False).work >= 1.0
    assert a.take() == ([], [])


def test_what_is_shared_prepares_nothing_ahead_but_takes_the_news():
    a = client()
    a.open([opened(0)], itertools.count())
    ahead = msgspec.structs.replace(item(0, 4, [9], k=5), ahead=[7, 8], hypotheses=3)
    a.ask(draft(ahead))
    assert a.bid(alone=False).work < 5
    assert a.take()[1] == [item(0, 4, [9], k=0)]
    for change in ({"ahead": [1] * 6}, {"ahead": [100]}, {"hypotheses": -1}):
        with pytest.raises(ProtocolError):
            a.ask(draft(msgspec.structs.replace(ahead, base_len=4, since=[], **change)))


def test_an_order_that_is_cancelled_while_it_waits_only_brings_the_news():
    a = client()
    a.open([opened(0)], itertools.count())
    assert not a.hurry(7)
    a.ask(draft(item(0, 4, [9])))
    assert not a.hurry(6)
    assert a.hurry(7)
    assert a.take()[1] == [item(0, 4, [9], k=0)]
    assert not a.hurry(7)


def test_who_leaves_gives_up_all_that_the_lane_holds():
    numbers, a = itertools.count(), client()
    a.open([opened(0), opened(1)], numbers)
    a.ask(draft(item(1, 3)))
    a.take()
    assert a.leave() == [1]


def test_log_probabilities_are_no_business_of_a_draft():
    numbers, a = itertools.count(), client()
    a.open([opened(0, sampling=msgspec.structs.replace(GREEDY, logprobs=3))], numbers)
    a.ask(draft(item(0, 3)))
    assert a.take()[0][0].sampling == GREEDY


@pytest.mark.parametrize(
    "bad",
    [
        opened(0, tokens=()),
        opened(0, tokens=(1, 100)),
        opened(0, tokens=(-1,)),
        OpenedSequence(0, 0, [1], 2, GREEDY),
        OpenedSequence(0, 0, [1], -1, GREEDY),
        *(
            opened(0, sampling=msgspec.structs.replace(GREEDY, **change))
            for change in (
                {"temperature": math.nan},
                {"temperature": math.inf},
                {"temperature": -1.0},
                {"top_p": 0.0},
                {"min_p": 2.0},
                {"top_k": -1},
                {"seed": -1},
                {"seed": 1 << 63},
                {"stop_token_ids": (100,)},
                {"constraints": msgspec.structs.replace(NO_CONSTRAINTS, logit_bias=((100, 1.0),))},
                {"constraints": msgspec.structs.replace(NO_CONSTRAINTS, bad_words=((1, 100),))},
                {"constraints": msgspec.structs.replace(NO_CONSTRAINTS, allowed_token_ids=(-1,))},
            )
        ),
    ],
)
def test_what_cannot_be_opened(bad):
    with pytest.raises(ProtocolError):
        client().open([bad], itertools.count())


def test_a_number_is_opened_once_and_closed_once():
    numbers, a = itertools.count(), client()
    a.open([opened(0)], numbers)
    with pytest.raises(ProtocolError, match="sequence 0 is open already"):
        a.open([opened(0)], numbers)
    with pytest.raises(ProtocolError, match="sequence 1 is not open"):
        a.close([1])


@pytest.mark.parametrize(
    "items",
    [
        [item(1, 3)],
        [item(0, 3, gen=1)],
        [item(0, 3), item(0, 3)],
        [item(0, 5, [4])],
        [item(0, 0)],
        [item(0, 2, [1, 2, 3])],
        [item(0, 4, [100])],
        [item(0, 3, k=6)],
        [item(0, 3, k=-1)],
        [item(0, 3, rows=[HiddenRows(0, 1, b"xx")])],
    ],
)
def test_what_cannot_be_asked(items):
    a = client()
    a.open([opened(0)], itertools.count())
    with pytest.raises(ProtocolError):
        a.ask(draft(*items))
    assert a.waiting is None


@pytest.mark.parametrize(
    ("rows", "possible"),
    [
        ([HiddenRows(0, 2, b"abcd"), HiddenRows(2, 1, b"ef")], True),
        ([HiddenRows(0, 2, b"abc")], False),
        ([HiddenRows(0, 2, b"", Descriptor("a", "e", 0, 1, 0, 4, "bf16", (2, 1)))], False),
        ([HiddenRows(2, 2, b"abcd")], False),
        ([HiddenRows(1, 1, b"ab"), HiddenRows(0, 1, b"ab")], False),
        ([HiddenRows(-1, 1, b"ab")], False),
        ([HiddenRows(0, 0, b"")], False),
    ],
)
def test_hidden_rows_are_whole_in_order_and_of_what_is_held(rows, possible):
    a = client(TERMS._replace(row_bytes=2))
    a.open([opened(0)], itertools.count())
    order = draft(item(0, 3, rows=rows))
    if possible:
        a.ask(order)
        return
    with pytest.raises(ProtocolError, match="hidden rows"):
        a.ask(order)


def test_nobody_takes_more_than_his_share():
    numbers, a = itertools.count(), client()
    a.open([opened(0), opened(1)], numbers)
    with pytest.raises(Overdrawn, match="more than 2 sequences"):
        a.open([opened(2)], numbers)
    a.close([1])
    with pytest.raises(Overdrawn, match="sequence 1 is longer than 200 tokens"):
        a.open([opened(1, [1] * 201)], numbers)
    a.open([opened(1)], numbers)
    with pytest.raises(Overdrawn, match="beyond 200 tokens"):
        a.ask(draft(item(0, 199, [1] * 196)))
    a.ask(draft(item(0, 190, [1] * 187), item(1, 60, [1] * 57, k=4)))
    a.take()
    with pytest.raises(Overdrawn, match="holds 320 tokens, its share is 256"):
        a.ask(draft(item(1, 60, k=5)))


def test_a_client_may_hold_less_than_its_share_but_not_more():
    a = client()
    with pytest.raises(Overdrawn, match="each client has 256 tokens here, not 257"):
        a.allocate(Allocate("e", 257))
    a.allocate(Allocate("e", 64))
    with pytest.raises(Overdrawn):
        a.open([opened(0, tokens=[1] * 65)], itertools.count())


def test_chatter_has_an_end():
    a = client()
    for _ in range(72):
        a.count_frame()
    with pytest.raises(Overdrawn, match="sent 73 frames since its last answer"):
        a.count_frame()
    a.answered()
    a.count_frame()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"lane": "target"}, "no target is served here"),
        ({"num_speculative_tokens": 6}, "try --num-speculative-tokens 5"),
        ({"max_sequences": 3}, "try --max-sequences 2"),
        ({"acceptance": "block"}, "try --acceptance coupled, there or block for the server"),
    ],
)
def test_what_an_executor_is_configured_for(change, reason):
    spec = LaneSpec("speculator", "remote", "ipc:///s", "bf16", "cpu", 1, 2, 4096, 5)
    said = client().configured(Configure("e", msgspec.structs.replace(spec, **change)))
    assert reason in said
    assert bool(said) == bool(reason)


def test_a_heavy_or_scarce_order_goes_alone():
    numbers, a = itertools.count(), client()
    a.open([opened(0), opened(1, tokens=[1] * 65)], numbers)
    a.ask(draft(item(0, 3), budget=2))
    assert a.bid(alone=False).alone is False
    assert a.bid(alone=True).alone is True
    a.ask(draft(item(0, 3), budget=1))
    assert a.bid(alone=False).alone is True
    a.ask(draft(item(1, 65)))
    assert a.bid(alone=False).alone is True


ORDERS = st.one_of(
    st.tuples(
        st.just("open"), st.integers(0, 3), st.lists(st.integers(-1, 100), max_size=6), st.integers(0, 1)
    ),
    st.tuples(st.just("close"), st.integers(0, 3)),
    st.tuples(
        st.just("ask"),
        st.lists(
            st.builds(
                item,
                seq=st.integers(0, 3),
                base_len=st.integers(0, 9),
                since=st.lists(st.integers(-1, 100), max_size=4),
                k=st.integers(-1, 6),
                gen=st.integers(0, 1),
            ),
            max_size=3,
        ),
    ),
)


@given(orders=st.lists(ORDERS, max_size=30))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_whatever_a_client_says_the_lane_is_told_what_it_can_do(orders):
    """The lane's own table of sequences takes every order that gets through, in the order of a server."""
    numbers, a, table = itertools.count(), client(), SequenceTable(None)
    for name, *arguments in orders:
        try:
            if name == "open":
                seq, tokens, gen = arguments
                a.open([opened(seq, tokens, gen)], numbers)
            elif name == "close":
                a.close(arguments)
            else:
                a.ask(draft(*arguments[0]))
        except (ProtocolError, Overdrawn):
            for number in a.leave():
                table.close(number)
            a = client()
            continue
        if a.waiting is not None:
            for number in a.closing:
                table.close(number)
            a.closing = []
            news, items = a.take()
            for one in news:
                table.open(one)
            for one in items:
                held = table.advance(one.seq, one.gen, one.base_len, one.since)
                assert all(0 <= token < 100 for token in held.tokens)
                assert len(held.tokens) + one.k <= TERMS.max_model_len
    for number in a.leave():
        table.close(number)
