"""The main faults over a real model, at temperature above 0: no token lost, repeated or changed."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from executor import LLM, Recovery, SamplingParams, Timeouts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PROMPTS = ["The quick brown fox jumps over", "def fibonacci(n):", "Once upon a time there was", "1, 2, 3, 4,"]
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def undisturbed(checkpoint: Path) -> list[list[int]]:
    with LLM(target=str(checkpoint), speculator="off", threads=1) as llm:
        return [c.token_ids for c in llm.generate(PROMPTS, PARAMS, progress=False)]


@pytest.fixture
def llm(checkpoint: Path, pruned: Path) -> Iterator[LLM]:
    models = {"target": str(checkpoint), "speculator": str(pruned)}
    timeouts = Timeouts(draft=2.0, hang=4.0)
    with LLM(**models, num_speculative_tokens=2, timeouts=timeouts, threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    ("checkpoint", "lane", "number"),
    [
        ("thin", "speculator", signal.SIGKILL),
        pytest.param("smollm2", "speculator", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("smollm2", "speculator", signal.SIGSTOP, marks=pytest.mark.slow),
        ("smollm2", "target", signal.SIGKILL),
    ],
    indirect=["checkpoint"],
    scope="session",
)
def test_no_token_changes(faults, llm, undisturbed, lane, number):
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    first = iter(streams[0])
    for _ in range(3):
        next(first)
    victim = next(each for each in llm.coordinator.lanes if each.name == lane)
    survivors = [each.process for each in llm.coordinator.lanes if each is not victim]
    victim.process.kill(number)
    for stream in (first, *streams[1:]):
        for _ in stream:
            pass
    assert [stream.completion.token_ids for stream in streams] == undisturbed
    assert [each.process for each in llm.coordinator.lanes if each.name != lane] == survivors
    faults.wait_for(lambda: llm.coordinator.deaths[lane] == 1)  # a stopped one is ended some seconds later


def test_a_head_that_takes_over_is_handed_the_rows_that_it_needs(faults, smollm2):
    """It drafts on within a sequence of which its predecessor alone had seen the beginning."""
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with LLM(target=str(smollm2), speculator="off", threads=1) as llm:
        (expected,) = llm.generate(PROMPTS[0], params, progress=False)
    spare = Recovery(standby=("speculator",))
    with LLM(
        target=str(smollm2), speculator="eagle", threads=1, num_speculative_tokens=3, recovery=spare
    ) as llm:
        spares = llm.coordinator._lanes.supervisor._spares
        faults.wait_for(lambda: "speculator" in spares and spares["speculator"].serving)
        stream = llm.stream(PROMPTS[0], params)
        rounds = iter(stream)
        next(rounds)
        llm.coordinator.lanes[1].process.kill(signal.SIGKILL)
        faults.wait_for(lambda: llm.coordinator.restarts.get("speculator") == 1)
        accepted = sum(llm.coordinator.stats.acceptance.accepted)
        for _ in rounds:
            pass
        assert stream.completion.token_ids == expected.token_ids
        assert sum(llm.coordinator.stats.acceptance.accepted) > accepted
