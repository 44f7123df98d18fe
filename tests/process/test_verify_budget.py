"""A batch of which not all guesses can be verified: the budget is kept, and the text is the same."""

from __future__ import annotations

import pytest

from executor import LLM, InvalidConfig, SamplingParams

TOYS = {"engine": "toy", "target": "vocabulary=64", "speculator": "vocabulary=64,agree=0.7"}
PARAMS = [SamplingParams(max_tokens=40, seed=seed, temperature=0.8) for seed in range(6)]
PROMPTS = [f"prompt {number}" for number in range(6)]


def test_the_text_does_not_depend_on_the_budget():
    texts = {}
    for most in (None, 1, 9, 20):
        with LLM(**TOYS, max_sequences=6, max_verify_tokens=most) as llm:
            done = llm.generate(PROMPTS, PARAMS, progress=False)
            texts[most] = [completion.token_ids for completion in done]
            stats = llm.coordinator.stats
            drafted, rounds = sum(stats.acceptance.drafted), stats.rounds
        if most is None:
            assert stats.spared == 0
        else:
            assert stats.spared > 0
            assert drafted <= rounds * max(0, most - 1)
        assert (drafted == 0) == (most == 1)
    assert texts[1] == texts[9] == texts[20] == texts[None]


def test_a_budget_must_be_a_number():
    with pytest.raises(InvalidConfig, match=r"max-verify-tokens must be a whole number from 1 to .*, got 0"):
        LLM(**TOYS, max_verify_tokens=0)
