"""Without a target nothing can be said: every open request hears why, at once, and all is cleaned up."""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from executor import InvalidConfig, InvalidRequest, LaneFailed


def open_streams(llm, faults):
    """Two that run, each begun for certain, and three that wait for a seat."""
    params = replace(faults.params, max_tokens=4000)
    streams = [llm.stream(f"{faults.prompt} {i}", params) for i in range(5)]
    readers = [iter(stream) for stream in streams]
    for reader in readers[:2]:
        next(reader)
    return readers


def reasons(readers) -> list[str]:
    """What each reader hears; what was generated before does not count."""
    heard = []
    for reader in readers:
        with pytest.raises(LaneFailed) as failure:
            for _ in reader:
                pass
        assert failure.value.lane == "target"
        heard.append(failure.value.reason)
    return heard


@pytest.mark.parametrize("speculator", ["off", "ngram", "vocabulary=256,agree=0.8"])
def test_killed_in_mid_generation(faults, speculator):
    with faults.toys(speculator=speculator, max_sequences=2) as llm:
        readers = open_streams(llm, faults)
        llm.coordinator.lanes[0].process.kill(signal.SIGKILL)
        assert reasons(readers) == ["killed by SIGKILL"] * 5
        with pytest.raises(LaneFailed, match="killed by SIGKILL"):
            llm.generate(faults.prompt)


def test_killed_while_idle(faults):
    with faults.toys() as llm:
        target = llm.coordinator.lanes[0]
        target.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: target.process is None)
        with pytest.raises(LaneFailed, match="target lane failed: killed by SIGKILL"):
            llm.generate(faults.prompt)


def test_stopped_in_mid_generation(faults):
    with faults.toys(max_sequences=2, timeouts={"verify": 0.5}) as llm:
        readers = open_streams(llm, faults)
        llm.coordinator.lanes[0].process.kill(signal.SIGSTOP)
        assert reasons(readers) == ["no verdict within 0.5 s"] * 5


def test_both_lanes_killed(faults):
    with faults.toys() as llm:
        readers = open_streams(llm, faults)
        for lane in llm.coordinator.lanes:
            lane.process.kill(signal.SIGKILL)
        assert reasons(readers) == ["killed by SIGKILL"] * 5


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        ("garbage", "sent a malformed frame"),
        ("answers as the other", "link to the target: Drafted is not legal in state busy"),
        ("fails", "out of memory"),
        ("verdict of another generation", "impossible verdict"),
        ("verdict of another length", "impossible verdict"),
        ("accepts more than was drafted", "impossible verdict"),
        ("accepts less than nothing", "impossible verdict"),
        ("samples a foreign token", "impossible verdict"),
        ("no verdict", "impossible verdict None"),
    ],
)
def test_a_target_that_cannot_be_trusted(faults, fake, behaviour, reason):
    fake("target", behaviour)
    with (
        faults.toys(speculator="ngram") as llm,
        pytest.raises(LaneFailed, match="target lane failed") as failure,
    ):
        llm.generate(faults.prompt, faults.params)
    assert reason in failure.value.reason


def test_a_target_that_ignores_stop_is_killed_when_its_time_is_up(faults, fake):
    fake("target", "deaf")
    llm = faults.toys(speculator="ngram", timeouts={"stop": 0.3})
    llm.start()
    llm.generate(faults.prompt, faults.params)
    began = time.monotonic()
    llm.close()
    assert 0.3 <= time.monotonic() - began < 10.0


def test_a_target_that_holds_less_than_was_thought_refuses_long_prompts_only(faults, fake):
    fake("target", "small")
    with faults.toys(speculator="ngram") as llm:
        long, short = llm.stream(list(range(8)), faults.params), llm.stream([1, 2, 3], faults.params)
        with pytest.raises(InvalidRequest, match="8 tokens, the context 8; shorten it to 7"):
            list(long)
        list(short)
        assert (short.completion.token_ids, short.completion.finish_reason) == ([1] * 5, "length")


@pytest.mark.parametrize("lane", ["target", "speculator"])
def test_lanes_of_different_vocabularies_do_not_start(faults, fake, lane):
    fake(lane, "another vocabulary")
    with pytest.raises(InvalidConfig, match=r"vocabularies differ: .* 257.* .another.") as refusal:
        faults.toys().start()
    assert refusal.value.field == "speculator"


def test_stopped_workers_are_killed_at_close(faults):
    with faults.toys(timeouts={"stop": 0.3}) as llm:
        for lane in llm.coordinator.lanes:
            lane.process.kill(signal.SIGSTOP)
