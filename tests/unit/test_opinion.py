"""What a head's logits say of its own guess and of others'."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from ipc.messages import OpenedSequence, SamplingSpec
from workers import noise
from workers.engines.engine import Draw
from workers.pure_sampler import noisy_best
from workers.sequence import LaneSequence
from workers.speculators import lookup
from workers.speculators.calibration import Calibration
from workers.speculators.lookup import Kind
from workers.speculators.opinion import HeadGuess, Seconded, first_estimate, opinion
from workers.speculators.proposals import Draft, Judge, Proposal

LOGITS = [2.0, 0.9, 0.5, -9.0]
TOKENS = [10, 20, 30, 40]


def draw(temperature: float, position: int = 5) -> Draw:
    return Draw(SamplingSpec(temperature, 1.0, 0, 0.0, 7, 0, (), None), position, 1, None)


def said(guess: int, how: Draw):
    return opinion(torch.tensor(LOGITS), torch.tensor(TOKENS), guess, how)


def lookup_guess(token: int, expected: float) -> Proposal:
    return Proposal(token, expected, Kind("own", 3, 1, 8, greedy=True))


def test_a_greedy_lead_is_the_difference_of_logits():
    found = said(10, draw(0.0))
    assert found.lead == pytest.approx(1.1)
    total = sum(map(math.exp, LOGITS))
    assert found.shares == pytest.approx(
        {token: math.exp(logit) / total for token, logit in zip(TOKENS, LOGITS, strict=True)}
    )


def test_the_runners_up_are_those_that_the_target_would_sample_next():
    assert said(10, draw(0.0)).others == [20, 30, 40]
    assert said(20, draw(0.0)).others == [10, 30, 40]  # the likeliest was filtered
    how = draw(0.7)
    key = noise.key(7, how.position, noise.TARGET)
    scores = {t: logit / 0.7 + noise.gumbel(key, t) for t, logit in zip(TOKENS, LOGITS, strict=True)}
    first, *others = sorted(TOKENS, key=scores.__getitem__, reverse=True)
    assert said(first, how).others == others
    many = torch.arange(12, dtype=torch.float32)
    assert opinion(many, torch.arange(12), 11, draw(0.0)).others == [10, 9, 8, 7]


@pytest.mark.parametrize("position", range(20))
def test_a_lead_counts_the_noise_that_the_target_samples_with(position):
    how = draw(0.7, position)
    winner = noisy_best(TOKENS, LOGITS, max(LOGITS), how)
    key = noise.key(7, position, noise.TARGET)
    scores = [logit / 0.7 + noise.gumbel(key, token) for logit, token in zip(LOGITS, TOKENS, strict=True)]
    *_, second, first = sorted(scores)
    found = said(winner, how)
    assert found.lead == pytest.approx(min(8.0, first - second), abs=1e-4)
    assert sum(found.shares.values()) == pytest.approx(1.0)


def test_who_won_only_because_others_were_filtered_has_no_lead():
    assert said(20, draw(0.0)).lead == 0.0
    assert said(77, draw(0.0)).lead == 0.0


def test_kinds():
    found = said(10, draw(0.0))
    assert found.kind(0, beside_lookups=True) == HeadGuess(0, 2, True, True)
    assert found.kind(6, beside_lookups=False) == HeadGuess(2, 2, False, True)
    assert found._replace(lead=8.0).kind(1, beside_lookups=True).lead == 7
    assert found.of(lookup_guess(10, 0.55)) == Seconded("own", 5, True, 0, True)
    assert found.of(lookup_guess(20, 1.0)) == Seconded("own", 9, False, 0, True)
    assert found.of(lookup_guess(40, 0.0)) == Seconded("own", 0, False, 4, True)
    assert found.of(lookup_guess(99, 0.3)) == Seconded("own", 3, False, 4, True)


def test_first_estimates_are_probabilities_that_follow_the_evidence():
    for greedy, step in itertools.product((False, True), range(3)):
        by_lead = [first_estimate(HeadGuess(step, lead, False, greedy)) for lead in range(8)]
        assert by_lead[0] > 0
        assert by_lead == sorted(by_lead)
        assert by_lead[-1] < 1
    for source, greedy in itertools.product(("own", "shared", "prior"), (False, True)):
        doubted = [
            first_estimate(Seconded(source, 5, False, decades, greedy)) for decades in range(4, -1, -1)
        ]
        by_evidence = [*doubted, first_estimate(Seconded(source, 5, True, 0, greedy))]
        assert by_evidence == sorted(set(by_evidence))
        by_length = [lookup.first_estimate(Kind(source, length, 1, 8, greedy)) for length in range(1, 9)]
        assert by_length[0] > 0
        assert by_length == sorted(set(by_length))
        assert by_length[-1] < 1


def test_what_was_proposed_comes_before_the_runners_up():
    draft = Draft(2)
    assert draft.add([Proposal(5, 0.5, "a"), Proposal(6, 0.1, "b"), Proposal(7, 0.3, "c")]) == 5
    assert draft.add([Proposal(5, 0.5, "a"), Proposal(6, 0.1, "b")], runners_up=[7, 6, 5, 8]) == 5
    assert draft.others == [[7, 6], [6, 7, 8]]


def test_guesses_that_were_not_for_choice_are_judged_too():
    calibration = Calibration(lambda kind: 0.5)
    judge = Judge(calibration)
    sequence = LaneSequence(OpenedSequence(0, 0, [1, 2], 1, draw(0.0).sampling))
    draft = Draft(3)
    aside = [Proposal(6, 0.9, "right"), Proposal(7, 0.9, "wrong")]
    assert draft.add([Proposal(5, 0.5, "chosen")], aside=aside) == 5
    assert draft.others == [[]]
    judge.remember(sequence, draft)
    sequence.tokens.append(6)
    judge.learn(sequence)
    assert calibration.expected("right") == 5 / 9
    assert calibration.expected("wrong") == calibration.expected("chosen") == 4 / 9
