"""Draft lengths: never more than can still be of use, never beyond a context."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import request

from executor.plan import Limits, Step, plan_round

SMALL = st.integers(1, 12)


@pytest.mark.parametrize(
    ("generated", "max_tokens", "limits", "k"),
    [
        (0, 100, Limits(5, 100, 100), 5),
        (0, 1, Limits(5, 100, 100), 0),
        (0, 2, Limits(5, 100, 100), 1),
        (0, 6, Limits(5, 100, 100), 5),
        (7, 10, Limits(5, 100, 100), 2),
        (9, 10, Limits(5, 100, 100), 0),
        (0, 100, Limits(5, 100, 0), 0),
        (0, 100, Limits(5, 5, 100), 1),
        (0, 100, Limits(5, 4, 100), 0),
        (0, 100, Limits(5, 100, 3), 0),
        (0, 100, Limits(5, 100, 2), 0),
        (0, 100, Limits(5, 100, 5), 2),
    ],
)
def test_draft_lengths(generated, max_tokens, limits, k):
    running = request([1, 2, 3], [0] * generated, max_tokens=max_tokens)
    assert plan_round([running], limits) == [Step(running, k)]


def test_every_running_sequence_takes_part_in_order():
    running = [request([1] * n, max_tokens=n) for n in (3, 1, 2)]
    plan = plan_round(running, Limits(2, 100, 100))
    assert [step.request for step in plan] == running
    assert [step.k for step in plan] == [2, 0, 1]


@settings(max_examples=500, derandomize=True, deadline=None)
@given(
    prompt=SMALL,
    left=SMALL,
    done=st.integers(0, 12),
    k=SMALL,
    target=st.integers(2, 40),
    own=st.integers(0, 40),
)
def test_a_draft_is_the_longest_of_use_within_both_contexts(prompt, left, done, k, target, own):
    running = request([1] * prompt, [1] * done, max_tokens=done + left)
    [(_, planned, _)] = plan_round([running], Limits(k, target, own))
    length = prompt + done

    def fits(drafted: int) -> bool:
        commits = drafted + 1
        return commits <= left and length + commits <= target and length + drafted <= own and drafted <= k

    assert planned == max((drafted for drafted in range(k + 1) if fits(drafted)), default=0)


@pytest.mark.parametrize(
    ("strikes", "alone"),
    [([0, 0, 0], None), ([1, 1, 1], 0), ([0, 2, 1], 2), ([2, 0, 2], 0), ([0, 0, 5], 2)],
)
def test_suspects_of_a_death_go_alone_the_least_suspect_first(strikes, alone):
    running = [request([1] * 3, max_tokens=9) for _ in strikes]
    for its, count in zip(running, strikes, strict=True):
        its.strikes = count
    planned = [step.request for step in plan_round(running, Limits(2, 100, 100))]
    assert planned == (running if alone is None else [running[alone]])


def test_a_quarantined_sequence_takes_plain_steps():
    running = request([1, 2, 3])
    running.speculate = False
    assert plan_round([running], Limits(5, 100, 100)) == [Step(running, 0, drafted=False)]
