"""Lanes on real GPUs: the shipped head drafts the same, whichever way its rows come."""

from __future__ import annotations

import pytest

from executor import LLM, SamplingParams, Timeouts

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = ["The capital of France is Paris. The capital of Germany is", "def fibonacci(n):"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)


def said(smollm2, **options) -> tuple[str, list]:
    timeouts = Timeouts(draft=60.0, draft_least=60.0, hang=60.0)
    common = {"speculator": "eagle", "device": "auto", "max_model_len": 256, "max_sequences": 2}
    with LLM(target=str(smollm2), timeouts=timeouts, **common, **options) as llm:
        done = llm.generate(PROMPTS, PARAMS, progress=False)
        name = llm.coordinator.transport.name
        return name, [(each.token_ids, each.acceptance.outcomes) for each in done]


@pytest.mark.usefixtures("devices")
def test_rows_by_cuda_ipc_make_the_same_drafts(smollm2):
    assert said(smollm2, require_cuda_ipc=True) == ("cuda_ipc", said(smollm2, transport="inline")[1])


@pytest.mark.usefixtures("devices")
def test_rows_by_memfd_make_the_same_drafts_from_a_gpu(smollm2):
    assert said(smollm2, transport="memfd") == ("memfd", said(smollm2, transport="inline")[1])


@pytest.mark.usefixtures("devices")
def test_a_killed_lane_is_joined_again(smollm2):
    timeouts = Timeouts(draft=60.0, draft_least=60.0, hang=60.0)
    options = {"speculator": "eagle", "max_model_len": 256, "max_sequences": 2}
    with LLM(target=str(smollm2), timeouts=timeouts, require_cuda_ipc=True, **options) as llm:
        before = [done.token_ids for done in llm.generate(PROMPTS, PARAMS, progress=False)]
        for number in range(2):
            llm.coordinator.lanes[number].process.kill()
            after = [done.token_ids for done in llm.generate(PROMPTS, PARAMS, progress=False)]
            assert after == before
