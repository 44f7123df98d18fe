"""Log-probabilities of prompts by real processes: what the model says, however the prompt comes to be run."""

from __future__ import annotations

import math
import signal
import threading
import time

import pytest

from executor import LLM, Completion, SamplingParams
from ipc.toy import ToyParameters
from workers.engines.toy import ToyModel

TARGET = "vocabulary=64"
SECONDS = 60.0
LONG = [(3 + position * position) % 64 for position in range(600)]  # takes three rounds
SPECULATORS = ["off", "ngram", "vocabulary=64,agree=0.7"]


def toys(speculator: str = "off", target: str = TARGET, **options) -> LLM:
    return LLM(engine="toy", target=target, speculator=speculator, threads=1, **options)


def asking(alternatives: int, **fields) -> SamplingParams:
    return SamplingParams(temperature=0.8, seed=3, prompt_logprobs=alternatives, **{"max_tokens": 9} | fields)


def told(completion: Completion) -> list[tuple[float, int, list[tuple[int, float]]]]:
    assert completion.prompt_logprobs is not None
    return [(entry.logprob, entry.rank, entry.top) for entry in completion.prompt_logprobs]


def expected(prompt: list[int], alternatives: int) -> list[tuple[float, int, list[tuple[int, float]]]]:
    """By the model itself."""
    model = ToyModel(ToyParameters.parse(TARGET))
    entries = []
    for position in range(1, len(prompt)):
        logits = model.logits(model.state(prompt[:position]))
        total = max(logits) + math.log(math.fsum(math.exp(logit - max(logits)) for logit in logits))
        order = sorted(range(64), key=lambda token: -logits[token])
        token = prompt[position]
        rank = 1 + sum(logit > logits[token] for logit in logits)
        best = [(other, logits[other] - total) for other in order[:alternatives]]
        entries.append((logits[token] - total, rank, best))
    return entries


@pytest.mark.parametrize("speculator", SPECULATORS)
def test_they_are_the_models_own_with_every_speculator(speculator):
    with toys(speculator) as llm:
        plain = llm.generate([LONG], SamplingParams(temperature=0.8, seed=3, max_tokens=9))[0]
        assert plain.prompt_logprobs is None
        # Now all of the prompt could be reused.
        whole, short, again = llm.generate([LONG, LONG[:1], LONG], [asking(2), asking(2), asking(0)])
        assert told(whole) == expected(LONG, 2)
        assert told(short) == []
        assert [entry[:2] for entry in told(again)] == [entry[:2] for entry in expected(LONG, 0)]
        assert whole.token_ids == again.token_ids == plain.token_ids
        assert llm.generate([LONG[:300]], asking(1))[0].prompt_logprobs is not None
        assert not any(llm.coordinator.deaths.values())


def test_they_come_with_the_first_delta():
    with toys("ngram") as llm:
        first, *others = llm.stream(LONG[:40], asking(1))
        assert len(first.prompt_logprobs) == 39
        assert all(delta.prompt_logprobs is None for delta in others)
        deltas = list(llm.stream(LONG[:40], SamplingParams(max_tokens=9)))
        assert all(delta.prompt_logprobs is None for delta in deltas)


def test_a_preempted_sequence_reports_its_prompt_once():
    asked = [LONG[:60], LONG[1:61]]
    with toys("vocabulary=64,agree=0.7", max_model_len=256, kv_tokens=6 * 64) as llm:
        done = llm.generate(asked, [asking(1, max_tokens=190, ignore_eos=True)] * 2)
        assert llm.coordinator.stats.preempted >= 1
        assert [told(each) for each in done] == [expected(prompt, 1) for prompt in asked]


def test_a_target_that_dies_over_a_prompt_is_asked_for_the_rest():
    with toys(target=f"{TARGET},step_ms=2") as llm:
        target = llm.coordinator.lanes[0]
        done: list[Completion] = []
        caller = threading.Thread(target=lambda: done.extend(llm.generate([LONG], asking(1), progress=False)))
        caller.start()
        deadline = time.monotonic() + SECONDS
        while not target.held:
            assert time.monotonic() < deadline
        target.process.kill(signal.SIGKILL)
        caller.join(SECONDS)
        assert told(done[0]) == expected(LONG, 1)
        assert llm.coordinator.deaths["target"] == 1
