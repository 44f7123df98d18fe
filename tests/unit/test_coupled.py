"""What noise says of a guess, against the sampler itself."""

from __future__ import annotations

import math

import pytest

from ipc.messages import SamplingSpec
from workers.engines.engine import Draw
from workers.pure_sampler import sample_row
from workers.speculators.coupled import given_noise

DRAWS = 4000


@pytest.mark.parametrize("probability", [0.05, 0.3, 0.7])
def test_it_foretells_how_often_the_sampler_agrees(probability):
    """On the average as often as the probability says, and among guesses of any worth as foretold."""
    temperature = 0.7
    rest = (1 - probability) / 5
    logits = [temperature * math.log(p) for p in (probability, *[rest] * 5)]
    foretold, agreed = [], []
    for position in range(DRAWS):
        sampling = SamplingSpec(temperature, 1.0, 0, 0.0, 5, 0, (), None)
        foretold.append(given_noise(probability, 0, sampling, position))
        agreed.append(sample_row(logits, Draw(sampling, position, 0)).token == 0)
    assert sum(agreed) / DRAWS == pytest.approx(probability, abs=0.03)
    for low, high in ((0.0, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 1.01)):
        chosen = [(f, a) for f, a in zip(foretold, agreed, strict=True) if low <= f < high]
        mean, share = sum(f for f, _ in chosen) / len(chosen), sum(a for _, a in chosen) / len(chosen)
        assert share == pytest.approx(mean, abs=3.5 * math.sqrt(0.25 / len(chosen)))


def test_greedy_has_no_noise():
    assert given_noise(0.3, 7, SamplingSpec(0.0, 1.0, 0, 0.0, 5, 0, (), None), 9) == 0.3
