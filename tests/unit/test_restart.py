"""When a dead lane is started again: at once, then ever later, then not any more."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.restart import JITTER, RestartHistory, RestartPolicy


def delays(policy: RestartPolicy, times: list[float], chance: float = 0.0) -> list[float | None]:
    history = RestartHistory(policy)
    return [history.died(now, chance) for now in times]


def test_the_first_is_at_once_then_the_delay_doubles_up_to_its_bound():
    policy = RestartPolicy(intensity=7, backoff=0.5, backoff_max=3.0)
    assert delays(policy, [0.0] * 7) == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_too_many_within_the_period_and_it_is_given_up():
    policy = RestartPolicy(intensity=2, period=10.0)
    assert delays(policy, [0.0, 9.0, 9.5]) == [0.0, policy.backoff, None]


def test_a_lane_that_lived_for_the_period_starts_over():
    policy = RestartPolicy(intensity=1, period=10.0)
    assert delays(policy, [0.0, 10.0, 20.0, 29.9]) == [0.0, 0.0, 0.0, None]


def test_chance_lengthens_a_delay_and_never_the_first():
    policy = RestartPolicy(backoff=1.0)
    assert delays(policy, [0.0, 0.0], chance=0.5) == [0.0, pytest.approx(1.0 + JITTER / 2)]


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    gaps=st.lists(st.floats(0, 20), max_size=30),
    intensity=st.integers(1, 12),
    chance=st.floats(0, 1, exclude_max=True),
)
def test_never_more_starts_within_a_period_than_the_intensity(gaps, intensity, chance):
    policy = RestartPolicy(intensity=intensity, period=10.0, backoff=0.1, backoff_max=2.0)
    times = [math.fsum(gaps[: i + 1]) for i in range(len(gaps))]
    for i, delay in enumerate(delays(policy, times, chance)):
        recent = sum(times[i] - time < policy.period for time in times[: i + 1])
        assert (delay is None) == (recent > intensity)
        assert delay is None or 0.0 <= delay <= policy.backoff_max * (1 + JITTER)
