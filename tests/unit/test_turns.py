"""Whose turn it is: fair by time of the lane, whatever orders cost, and nobody saves up."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.bench.pool import fairness
from executor.pool.suspects import BARRED_SECONDS, STRIKES, Suspects
from executor.pool.turns import Bid, Turns


@given(costs=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=5), alone=st.booleans())
@settings(max_examples=60, deadline=None)
def test_clients_that_always_ask_get_the_same_time_of_the_lane(costs, alone):
    turns, spent = Turns(), dict.fromkeys(range(len(costs)), 0.0)
    for client in spent:
        turns.ask(client)
    bids = [Bid(client, cost, alone) for client, cost in enumerate(costs)]
    for _ in range(300):
        chosen = turns.choose(bids)
        turns.pay(chosen, sum(bid.work for bid in chosen))
        for bid in chosen:
            spent[bid.client] += bid.work
            turns.ask(bid.client)
    if alone:
        assert max(spent.values()) - min(spent.values()) <= 2 * max(costs)
    else:
        assert all(bids[client].work * 300 == pytest.approx(time) for client, time in spent.items())


def test_who_was_idle_has_saved_nothing_and_owes_nothing():
    turns = Turns()
    turns.ask("busy")
    for _ in range(10):
        turns.pay(turns.choose([Bid("busy", 1.0, True)]), 1.0)
        turns.ask("busy")
    turns.ask("late")
    both = [Bid("busy", 1.0, True), Bid("late", 1.0, True)]
    order = []
    for _ in range(6):
        chosen = turns.choose(both)
        turns.pay(chosen, 1.0)
        turns.ask(chosen[0].client)
        order.append(chosen[0].client)
    assert order.count("late") == 3


def test_light_orders_go_together_and_a_heavy_one_waits_its_turn_alone():
    turns = Turns()
    bids = [Bid("a", 5.0, False), Bid("b", 5.0, False), Bid("c", 64.0, True)]
    for bid in bids:
        turns.ask(bid.client)
    assert turns.choose(bids) == bids[:2]
    turns.pay(bids[:2], 1.0)
    for bid in bids[:2]:
        turns.ask(bid.client)
    assert turns.choose(bids) == bids[2:]


def test_one_client_s_heavy_orders_do_not_hold_up_the_light_ones_of_another():
    turns, light, heavy = Turns(), Bid("light", 5.0, False), Bid("heavy", 64.0, True)
    turns.ask("light")
    turns.ask("heavy")
    order = []
    for _ in range(30):
        (chosen,) = turns.choose([light, heavy])
        turns.pay([chosen], 0.01 if chosen is light else 0.1)
        turns.ask(chosen.client)
        order.append(chosen.client)
    assert order.count("heavy") <= 4


def test_who_is_gone_is_forgotten():
    turns = Turns()
    turns.ask("a")
    turns.pay(turns.choose([Bid("a", 1.0, False)]), 100.0)
    turns.forget("a")
    turns.ask("a")
    turns.ask("b")
    assert [bid.client for bid in turns.choose([Bid("a", 1.0, True), Bid("b", 1.0, True)])] == ["a"]


def test_fairness_is_jain_s():
    assert fairness([5.0, 5.0, 5.0]) == 1.0
    assert fairness([6.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert fairness([0.0, 0.0]) == 1.0


def test_a_suspect_is_served_alone_until_it_has_been_answered():
    suspects = Suspects()
    suspects.died(["a", "b"], 0.0)
    assert suspects.alone("a")
    suspects.answered(["a"])
    assert (suspects.alone("a"), suspects.alone("b"), suspects.alone("c")) == (False, True, False)


def test_who_ends_the_lane_again_and_again_is_barred_for_a_while():
    suspects = Suspects()
    for strike in range(STRIKES):
        assert suspects.barred("a", 0.0) == 0.0
        suspects.died(["a"], float(strike))
    last = float(STRIKES - 1)
    assert suspects.barred("a", last) == BARRED_SECONDS
    assert suspects.barred("b", last) == 0.0
    assert suspects.barred("a", last + BARRED_SECONDS) == 0.0
    assert not suspects.alone("a")
