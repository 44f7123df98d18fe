"""A request that kills a lane each time fails, or goes on without drafts, alone: the others never notice."""

from __future__ import annotations

from dataclasses import replace

import pytest
from faulty_worker import POISON, POISON_AFTER

from executor import Recovery, RequestFailed, RestartPolicy

BAD = 2
PROMPTS = [[1, 2, 3], [4, 5], [POISON, 6, 7], [8, 9], [10] * 30]
"""The one at BAD kills once POISON_AFTER tokens of it are committed."""
RECOVERY = Recovery(policy=RestartPolicy(intensity=100, backoff=0.01, backoff_max=0.05))
TIMEOUTS = {"draft": 0.3, "hang": 0.6, "verify": 1.0}


@pytest.fixture(scope="module")
def expected(undisturbed_outputs):
    return undisturbed_outputs(PROMPTS)


def test_of_the_target(faults, inject, expected):
    inject("target", "abort", "poison")
    with faults.toys(recovery=RECOVERY) as llm:
        streams = [llm.stream(prompt, faults.params) for prompt in PROMPTS]
        for i, stream in enumerate(streams):
            if i != BAD:
                assert [token for delta in stream for token in delta.token_ids] == expected[i]
        tokens: list[int] = []
        with pytest.raises(RequestFailed, match="died 3 times in a row over it: killed by SIGABRT"):
            tokens.extend(token for delta in streams[BAD] for token in delta.token_ids)
        assert llm.coordinator.deaths == {"target": 3, "speculator": 0}
        assert llm.generate([PROMPTS[0]], faults.params)[0].token_ids == expected[0]
        assert llm.coordinator.health.state == "healthy"
    assert tokens == expected[BAD][: len(tokens)]
    assert len(tokens) >= POISON_AFTER


def test_of_the_target_by_hanging(faults, inject, expected):
    inject("target", "hang", "poison")
    recovery = replace(RECOVERY, strikes=2)
    with faults.toys(recovery=recovery, timeouts=TIMEOUTS) as llm:
        streams = [llm.stream(prompt, faults.params) for prompt in PROMPTS]
        with pytest.raises(RequestFailed, match="died 2 times in a row over it: no verdict within 1 s"):
            list(streams[BAD])
        for i, stream in enumerate(streams):
            if i != BAD:
                assert [token for delta in stream for token in delta.token_ids] == expected[i]
        assert llm.coordinator.deaths == {"target": 2, "speculator": 0}


@pytest.mark.parametrize(
    ("fault", "max_tokens"), [("abort", 300), pytest.param("hang", 700, marks=pytest.mark.slow)]
)
def test_of_the_speculator(faults, inject, undisturbed_outputs, fault, max_tokens):
    """Its drafts are given up after three deaths, while the others' go on; no text changes."""
    inject("speculator", fault, "poison")
    params = replace(faults.params, max_tokens=max_tokens)
    long = undisturbed_outputs(PROMPTS, params)
    target = "vocabulary=256,step_ms=5"
    with faults.toys(target=target, recovery=RECOVERY, timeouts=TIMEOUTS) as llm:
        target_lane, _ = llm.coordinator.lanes
        completions = llm.generate(PROMPTS, params)
        assert [completion.token_ids for completion in completions] == long
        stats = llm.coordinator.stats
        assert stats.quarantined == 1
        assert llm.coordinator.deaths == {"target": 0, "speculator": 3}
        assert llm.coordinator.lanes[0] is target_lane
        drafted = [sum(completion.acceptance.drafted) for completion in completions]
        assert all(drafted[BAD] < others for i, others in enumerate(drafted) if i != BAD)
        again = llm.generate([PROMPTS[0]], faults.params)[0]
        assert again.acceptance_length > 1.0
