"""Lanes as threads of this process: the same tokens, the same recovery from errors, nothing left behind."""

from __future__ import annotations

import os
import signal
import threading

import psutil
import pytest

from executor import LLM, InvalidConfig, Recovery, RestartPolicy, SamplingParams, Timeouts
from executor.cli.run import run
from workers.engines.toy import ToyEngine

PARAMS = SamplingParams(max_tokens=60, temperature=0.9, seed=5)
PROMPTS = ["one", "another", "a third"]
DRAFT = "vocabulary=256,agree=0.8"


def toys(**options) -> LLM:
    policy = RestartPolicy(intensity=20, backoff=0.01, backoff_max=0.05)
    patient = Timeouts(draft=60.0, draft_least=60.0, hang=60.0)
    return LLM(engine="toy", threads=1, recovery=Recovery(policy=policy), timeouts=patient, **options)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with toys(speculator="off") as llm:
        return [done.token_ids for done in llm.generate(PROMPTS, PARAMS)]


def test_the_same_tokens_from_one_process(expected):
    children = psutil.Process().children()
    with toys(speculator=DRAFT, lanes="inline") as llm:
        done = llm.generate(PROMPTS, PARAMS)
        assert [each.token_ids for each in done] == expected
        assert all(each.acceptance_length > 1.0 for each in done)
        assert [lane.process.pid for lane in llm.coordinator.lanes] == [os.getpid()] * 2
        assert psutil.Process().children() == children


@pytest.mark.parametrize("lane", ["target", "speculator"])
def test_a_lane_that_fails_is_started_again(expected, monkeypatch, lane, capfd):
    """A fault of one lane, by its thread: what a debugger would be attached to."""
    forward, struck = ToyEngine.forward, []

    def faulty(self, windows):
        if threading.current_thread().name == f"speclane-{lane}" and len(struck) < 2:
            struck.append(lane)
            raise RuntimeError("planted")
        return forward(self, windows)

    with toys(speculator=DRAFT, lanes="inline") as llm:
        monkeypatch.setattr(ToyEngine, "forward", faulty)
        assert [each.token_ids for each in llm.generate(PROMPTS, PARAMS)] == expected
        assert struck
        assert llm.coordinator.deaths[lane] >= 1
    assert "RuntimeError: planted" in capfd.readouterr().err


def test_the_speculator_is_swapped(expected):
    with toys(speculator="off", lanes="inline") as llm:
        llm.swap_speculator(DRAFT)
        assert llm.generate(PROMPTS, PARAMS)[0].acceptance_length > 1.0
        llm.swap_speculator("off")
        assert [each.token_ids for each in llm.generate(PROMPTS, PARAMS)] == expected
        assert len(llm.coordinator.lanes) == 1


def test_nothing_is_left_behind():
    def held() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    with toys(speculator=DRAFT, lanes="inline"):
        pass
    before = held()
    for _ in range(3):
        with toys(speculator=DRAFT, lanes="inline") as llm:
            llm.generate(PROMPTS, PARAMS)
    assert held() == before


def test_a_lane_told_to_go_goes_without_a_signal():
    with toys(speculator=DRAFT, lanes="inline") as llm:
        speculator = llm.coordinator.lanes[1]
        worker = speculator.process
        assert worker.kill(signal.SIGUSR1)
        assert worker.wait(0.0) is None
        assert worker.kill()
        assert worker.wait(10.0**9) == 0
        assert not worker.kill()


def test_another_word_is_refused():
    with pytest.raises(
        InvalidConfig, match="lanes must be one of process, inline, got 'thread'; try process"
    ):
        LLM(engine="toy", lanes="thread")


def test_from_the_command_line(capsys):
    given = ("generate", "--engine", "toy", "--prompt", "x", "--seed", "1", "--max-tokens", "20")
    outputs = []
    for lanes in ("inline", "process"):
        assert run([*given, "--lanes", lanes, "--speculator", DRAFT]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""


@pytest.mark.model
def test_a_real_model(checkpoint):
    options = {"target": str(checkpoint), "threads": 1, "max_model_len": 256}
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
    outputs = []
    for lanes in ("inline", "process"):
        with LLM(lanes=lanes, **options) as llm:
            outputs.append(llm.generate("Say ten ten ten ten ten", params)[0].token_ids)
    assert outputs[0] == outputs[1]
