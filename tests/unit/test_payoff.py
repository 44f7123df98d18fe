"""Whether to wait for drafts: the better way is found and kept, whatever makes drafts dear."""

from __future__ import annotations

import random

import pytest

from executor.payoff import TRIAL_ROUNDS, Payoff

STEP = 0.020
K = 5
DRAFT = 0.001


class Run:
    """Rounds by a clock of their own. `agree`: how likely a guess is right where all before it are."""

    def __init__(self, agree: float, seed: int = 1) -> None:
        self.payoff = Payoff()
        self.agree = agree
        self.chance = random.Random(seed)
        self.waited: list[bool] = []
        self.seconds = 0.0
        self.tokens = 0

    def go_on(self, seconds: float, rtt: float, sequences: int = 1) -> float:
        """Tokens per second of the next so many seconds."""
        end, began, before = self.seconds + seconds, self.seconds, self.tokens
        while self.seconds < end:
            waits = self.payoff.waits(sequences)
            self.waited.append(waits)
            took, settled = STEP, 1
            if waits:
                took += rtt + K * DRAFT
                while settled <= K and self.chance.random() < self.agree:
                    settled += 1
            self.payoff.note(sequences, took, settled)
            self.seconds += took
            self.tokens += settled
        return (self.tokens - before) / (self.seconds - began)


def expected(agree: float, rtt: float) -> float:
    """Tokens per second of rounds that all wait."""
    return sum(agree**i for i in range(K + 1)) / (STEP + rtt + K * DRAFT)


@pytest.mark.parametrize("rtt", [0.0, 0.001, 0.005, 0.020, 0.100, 1.0])
@pytest.mark.parametrize("agree", [0.0, 0.3, 0.8, 1.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_it_is_never_much_slower_than_the_better_way(agree, rtt, seed):
    run = Run(agree, seed)
    run.go_on(60.0, rtt)  # the first look at a way costs what it costs
    plain, waiting = 1 / STEP, expected(agree, rtt)
    speed = run.go_on(120.0, rtt)
    assert speed >= 0.95 * plain
    assert speed >= 0.90 * max(plain, waiting)


def test_it_begins_with_waiting_and_looks_at_both_ways_soon():
    run = Run(agree=1.0)
    run.go_on(1.0, rtt=0.001)
    assert all(run.waited[:TRIAL_ROUNDS])
    assert not any(run.waited[TRIAL_ROUNDS : 2 * TRIAL_ROUNDS])
    assert all(run.waited[2 * TRIAL_ROUNDS :])


def test_it_stops_at_once_when_the_way_becomes_long_and_is_back_when_it_is_short_again():
    run = Run(agree=0.8)
    assert run.go_on(30.0, rtt=0.001) > 1.5 / STEP
    run.waited.clear()
    run.go_on(6.0, rtt=0.200)
    assert run.waited[:3] == [True] * 3
    assert run.waited.count(True) <= 16
    run.go_on(60.0, rtt=0.001)
    assert run.go_on(30.0, rtt=0.001) > 1.5 / STEP


def test_trials_of_what_is_dear_become_rare():
    run = Run(agree=0.0)
    run.go_on(60.0, rtt=0.5)
    run.waited.clear()
    run.go_on(120.0, rtt=0.5)
    assert 0 < run.waited.count(True) <= 5 * TRIAL_ROUNDS


def test_how_many_sequences_run_is_a_case_of_its_own():
    run = Run(agree=0.0)
    run.go_on(10.0, rtt=0.1, sequences=1)
    assert not run.payoff.waits(1)
    assert run.payoff.waits(8)
