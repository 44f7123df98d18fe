"""Sequences of a real model that have to share too little memory say what each says alone."""

from __future__ import annotations

import pytest

from executor import LLM, SamplingParams

COUNT = 16
PROMPTS = [f"Item {i}: " + "a short list of words, " * (1 + i % 4) for i in range(COUNT)]
PARAMS = [
    SamplingParams(temperature=0.7 * (i % 2), seed=i, max_tokens=130 if i < 3 else 3 + i % 4, ignore_eos=True)
    for i in range(COUNT)
]


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_sixteen_sequences_under_a_limit_equal_each_alone(smollm2, dtype):
    """The first three join with a block each, and grow to three each, of four that there are."""
    options = {"target": str(smollm2), "max_model_len": 256, "threads": 1, "dtype": dtype}
    with LLM(**options, speculator="off", reuse_prefixes=False) as llm:
        alone = [llm.generate([p], its)[0].token_ids for p, its in zip(PROMPTS, PARAMS, strict=True)]
    with LLM(**options, speculator="ngram", max_sequences=16, kv_tokens=4 * 64) as llm:
        together = [done.token_ids for done in llm.generate(PROMPTS, PARAMS, progress=False)]
        assert together == alone
        assert llm.coordinator.stats.preempted > 0
        assert not any(llm.coordinator.deaths.values())
