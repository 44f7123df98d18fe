"""Every mode with real processes: the same tokens as without speculation, and both lanes at work."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

import pytest

from executor import LLM, SamplingParams, Timeouts

TARGET = "vocabulary=64"
DRAFT = "vocabulary=64,agree=0.7,near=0.8"
COUNT = 5
PROMPTS = [f"prompt {i}" for i in range(COUNT)]
SETTINGS: dict[str, dict[str, Any]] = {
    "sequential": {},
    "ahead": {"mode": "ahead"},
    "outcomes": {"mode": "outcomes"},
    "two ubatches": {"ubatches": 2},
    "all of it": {"mode": "outcomes", "ubatches": 2, "num_speculative_tokens": 3},
    "auto": {"mode": "auto"},
}


def params(temperature: float) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=40 + 5 * i, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(COUNT)
    ]


def toys(speculator: str = DRAFT, **options: Any) -> LLM:
    patient = Timeouts(draft=60.0, draft_least=60.0, hang=60.0)
    return LLM(engine="toy", target=TARGET, speculator=speculator, threads=1, timeouts=patient, **options)


@pytest.fixture(scope="module")
def expected() -> dict[float, list[list[int]]]:
    with toys("off") as llm:
        return {
            temperature: [done.token_ids for done in llm.generate(PROMPTS, params(temperature))]
            for temperature in (0.0, 0.9)
        }


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("speculator", [DRAFT, "suffix"])
def test_each_gives_the_same_tokens(expected, name, speculator):
    with toys(speculator, **SETTINGS[name]) as llm:
        for temperature, texts in expected.items():
            done = llm.generate(PROMPTS, params(temperature))
            assert [each.token_ids for each in done] == texts
        stats = llm.coordinator.stats
        assert (stats.invalid, stats.broken, stats.quarantined) == (0, 0, 0)
        assert llm.coordinator.deaths == {"target": 0, "speculator": 0}
        if speculator == DRAFT and name in ("ahead", "outcomes"):
            assert stats.hits > 0
            assert stats.misses > 0


@pytest.mark.parametrize("name", ["ahead", "all of it"])
@pytest.mark.parametrize("lane", [0, 1], ids=["target", "speculator"])
def test_a_lane_that_dies_takes_nothing_along(expected, name, lane):
    with toys(DRAFT, **SETTINGS[name]) as llm:
        streams = [llm.stream(prompt, its) for prompt, its in zip(PROMPTS, params(0.9), strict=True)]
        first = iter(streams[0])
        tokens = list(next(first).token_ids)
        llm.coordinator.lanes[lane].process.kill(signal.SIGKILL)
        tokens += [token for delta in first for token in delta.token_ids]
        others = [[token for delta in stream for token in delta.token_ids] for stream in streams[1:]]
        assert [tokens, *others] == expected[0.9]


def test_branches_take_no_more_than_there_is(expected):
    """Memory for the sequences themselves, and hardly any for what they might become."""
    with toys(DRAFT, mode="outcomes", max_model_len=128, kv_tokens=COUNT * 128) as llm:
        assert [done.token_ids for done in llm.generate(PROMPTS, params(0.9))] == expected[0.9]
        assert llm.coordinator.deaths == {"target": 0, "speculator": 0}


def test_penalties_hold_in_branches(expected):
    its = SamplingParams(max_tokens=30, temperature=0.9, seed=3, frequency_penalty=1.5, ignore_eos=True)
    with toys("off") as llm:
        alone = llm.generate(PROMPTS, its)
    with toys(DRAFT, mode="outcomes") as llm:
        together = llm.generate(PROMPTS, its)
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]


def test_simulate() -> None:
    options = (
        "--mode",
        "ahead",
        "--repeat",
        "1",
        "--new-tokens",
        "40",
        "--target-ms",
        "40",
        "--draft-ms",
        "0.2",
    )
    command = sys.executable, "-m", "executor", "bench", "simulate", *options, "--json"
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    result = json.loads(done.stdout)
    assert (result["mode"], result["k"], result["n"], result["ubatches"]) == ("ahead", 5, 1, 1)
    assert 0 < result["hit_rate"] < 1
    assert result["acceptance_length"] > result["formula"] > 1
    assert result["share"] == pytest.approx(result["tokens_per_step"] / result["formula"], rel=1e-3)
