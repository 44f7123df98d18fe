"""Lanes killed over and over at random moments, under traffic: every text is as if undisturbed."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from executor import Recovery, RestartPolicy, SamplingParams

CONCURRENT = 16
PROMPTS = [f"in the storm {i}" * (1 + i % 3) for i in range(CONCURRENT)]
PARAMS = [
    SamplingParams(max_tokens=60 + 7 * i, temperature=0.9, top_p=0.95, seed=i) for i in range(CONCURRENT)
]
RECOVERY = Recovery(policy=RestartPolicy(intensity=10**6, backoff=0.01, backoff_max=0.05))
K = 5
BREATH = CONCURRENT * (K + 1) + 1
"""Tokens after which all that were suspected of the target's last death have had a verdict."""
PATIENCE_SECONDS = 60.0


class Storm:
    """Kills lanes in a seeded order, each incarnation at most once, paced by committed tokens.

    Some die as soon as they are there, the others when they serve.
    """

    def __init__(self, llm, seed: int, kills: dict[str, int]) -> None:
        self._llm = llm
        self._random = random.Random(seed)
        self._victims = [name for name, count in kills.items() for _ in range(count)]
        self._random.shuffle(self._victims)
        self._tokens = 0
        self._committed = threading.Condition()
        self._killed: set[str] = set()

    def count(self, tokens: int) -> None:
        with self._committed:
            self._tokens += tokens
            self._committed.notify()

    def rage(self) -> None:
        target_died_at = -BREATH
        for name in self._victims:
            due = self._tokens + self._random.randint(1, 40)
            if name == "target":
                due = max(due, target_died_at + BREATH)
            self._wait_for_tokens(due)
            self._kill(name, when_it_serves=self._random.random() < 0.6)
            if name == "target":
                target_died_at = self._tokens

    def _wait_for_tokens(self, count: int) -> None:
        with self._committed:
            assert self._committed.wait_for(lambda: self._tokens >= count, PATIENCE_SECONDS)

    def _kill(self, name: str, when_it_serves: bool) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            lane = next(lane for lane in self._llm.coordinator.lanes if lane.name == name)
            process = lane.process
            fresh = lane.epoch not in self._killed and (lane.serving or not when_it_serves)
            if fresh and process is not None and process.kill():
                self._killed.add(lane.epoch)
                return
            time.sleep(0.001)
        raise AssertionError(f"no {name} lane came back to be killed")


@pytest.fixture(scope="module")
def expected(undisturbed_outputs):
    return undisturbed_outputs(PROMPTS, PARAMS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        (1, {"speculator": 20, "target": 4}),
        pytest.param(2, {"speculator": 200, "target": 20}, marks=pytest.mark.slow),
    ],
)
def test_a_storm(faults, expected, seed, kills):
    llm = faults.toys(
        target="vocabulary=256,step_ms=2",
        recovery=RECOVERY,
        num_speculative_tokens=K,
        max_sequences=CONCURRENT,
    )

    def read(job) -> list[int]:
        prompt, params = job
        tokens: list[int] = []
        for delta in llm.stream(prompt, params):
            tokens += delta.token_ids
            storm.count(len(delta.token_ids))
        return tokens

    with llm, ThreadPoolExecutor(CONCURRENT + 1) as pool:
        storm = Storm(llm, seed, kills)
        raging = pool.submit(storm.rage)
        while not raging.done():
            assert list(pool.map(read, zip(PROMPTS, PARAMS, strict=True))) == expected
        raging.result()
        faults.wait_for(lambda: llm.coordinator.deaths == kills)
        faults.wait_until_healthy(llm)
        again = llm.generate(faults.prompt, faults.params)[0]
        assert again.acceptance_length > 1.0
        assert llm.coordinator.deaths == kills  # nothing died but what was killed
