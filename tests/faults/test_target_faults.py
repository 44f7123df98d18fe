"""A target that dies pauses the streams, no more: it is started again and they go on where they were.

Only a target that is given up ends the executor, and only a request that kills it again and again fails.
"""

from __future__ import annotations

import signal
import time
from dataclasses import replace

import pytest

from executor import InvalidConfig, InvalidRequest, LaneFailed, Recovery, RequestFailed, RestartPolicy

NEVER_AGAIN = Recovery(policy=RestartPolicy(intensity=0))


def open_streams(llm, faults, max_tokens=4000):
    """Two that run, each begun for certain, and three that wait for a seat."""
    params = replace(faults.params, max_tokens=max_tokens)
    streams = [llm.stream(f"{faults.prompt} {i}", params) for i in range(5)]
    readers = [iter(stream) for stream in streams]
    begun = [next(reader).token_ids for reader in readers[:2]]
    return readers, [*begun, [], [], []]


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


def rest(readers, begun) -> list[list[int]]:
    """The tokens of each stream, to its end."""
    return [
        [*tokens, *(token for delta in reader for token in delta.token_ids)]
        for reader, tokens in zip(readers, begun, strict=True)
    ]


@pytest.fixture(scope="session")
def five(undisturbed_outputs):
    return undisturbed_outputs([f"a prompt {i}" for i in range(5)])


@pytest.mark.parametrize("speculator", ["off", "ngram", "vocabulary=256,agree=0.8"])
def test_killed_in_mid_generation(faults, five, speculator):
    with faults.toys(speculator=speculator, max_sequences=2) as llm:
        target, *others = llm.coordinator.lanes
        readers, begun = open_streams(llm, faults, max_tokens=120)
        target.process.kill(signal.SIGKILL)
        assert rest(readers, begun) == five
        assert target.down_because == "killed by SIGKILL"
        again, *same = llm.coordinator.lanes
        assert again.serving
        assert again.epoch != target.epoch
        assert same == others
        assert llm.coordinator.deaths["target"] == 1


def test_killed_while_idle(faults, undisturbed):
    with faults.toys() as llm:
        target, speculator = llm.coordinator.lanes
        target.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: target.process is None)
        assert target.down_because == "killed by SIGKILL"
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        assert llm.coordinator.lanes[1] is speculator


def test_stopped_in_mid_generation(faults, five):
    with faults.toys(max_sequences=2, timeouts={"verify": 0.5}) as llm:
        target = llm.coordinator.lanes[0]
        readers, begun = open_streams(llm, faults, max_tokens=120)
        target.process.kill(signal.SIGSTOP)
        assert rest(readers, begun) == five
        assert target.down_because == "no verdict within 0.5 s"


def test_both_lanes_killed(faults, five):
    with faults.toys(max_sequences=2) as llm:
        before = llm.coordinator.lanes
        readers, begun = open_streams(llm, faults, max_tokens=120)
        for lane in before:
            lane.process.kill(signal.SIGKILL)
        assert rest(readers, begun) == five
        faults.wait_until_healthy(llm)
        assert not {lane.epoch for lane in before} & {lane.epoch for lane in llm.coordinator.lanes}


@pytest.mark.parametrize("speculator", ["off", "ngram", "vocabulary=256,agree=0.8"])
def test_given_up_in_mid_generation(faults, speculator):
    with faults.toys(speculator=speculator, max_sequences=2, recovery=NEVER_AGAIN) as llm:
        readers, _ = open_streams(llm, faults)
        llm.coordinator.lanes[0].process.kill(signal.SIGKILL)
        assert reasons(readers) == ["killed by SIGKILL"] * 5
        with pytest.raises(LaneFailed, match="killed by SIGKILL"):
            llm.generate(faults.prompt)
        assert llm.coordinator.health.state == "failed"
        assert llm.coordinator.health.reason == "target lane failed: killed by SIGKILL"


def test_given_up_while_idle(faults):
    with faults.toys(recovery=NEVER_AGAIN) as llm:
        target = llm.coordinator.lanes[0]
        target.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: target.process is None)
        with pytest.raises(LaneFailed, match="target lane failed: killed by SIGKILL"):
            llm.generate(faults.prompt)


def test_stopped_and_given_up_in_mid_generation(faults):
    with faults.toys(max_sequences=2, timeouts={"verify": 0.5}, recovery=NEVER_AGAIN) as llm:
        readers, _ = open_streams(llm, faults)
        llm.coordinator.lanes[0].process.kill(signal.SIGSTOP)
        assert reasons(readers) == ["no verdict within 0.5 s"] * 5


def test_both_lanes_killed_and_given_up(faults):
    with faults.toys(recovery=NEVER_AGAIN) as llm:
        readers, _ = open_streams(llm, faults)
        for lane in llm.coordinator.lanes:
            lane.process.kill(signal.SIGKILL)
        assert reasons(readers) == ["killed by SIGKILL"] * 5


UNTRUSTWORTHY = [
    ("garbage", "sent a malformed frame"),
    ("answers as the other", "link to the target: Drafted is not legal in state busy"),
    ("fails", "out of memory"),
    ("verdict of another generation", "impossible verdict"),
    ("verdict of another length", "impossible verdict"),
    ("accepts more than was drafted", "impossible verdict"),
    ("accepts less than nothing", "impossible verdict"),
    ("samples a foreign token", "impossible verdict"),
    ("no verdict", "impossible verdict None"),
]


@pytest.mark.parametrize(("behaviour", "reason"), UNTRUSTWORTHY)
def test_a_target_that_cannot_be_trusted(faults, fake, behaviour, reason):
    """Nothing that it says is committed; the request that it never answers is given up."""
    fake("target", behaviour)
    recovery = Recovery(policy=RestartPolicy(backoff=0.01), strikes=2)
    with faults.toys(speculator="ngram", recovery=recovery) as llm:
        stream = llm.stream(faults.prompt, faults.params)
        with pytest.raises(RequestFailed, match="the target died 2 times in a row over it: ") as failure:
            next(iter(stream))
        assert reason in str(failure.value)
        assert llm.coordinator.deaths["target"] == 2


@pytest.mark.parametrize("strikes", [1, 3])
def test_the_strikes_of_a_request(faults, fake, strikes):
    fake("target", "fails")
    with faults.toys(speculator="off", recovery=Recovery(strikes=strikes)) as llm:
        with pytest.raises(RequestFailed, match=f"died {strikes} times in a row over it: out of memory"):
            llm.generate(faults.prompt, faults.params)
        assert llm.coordinator.deaths["target"] == strikes


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
        with pytest.raises(InvalidRequest, match="8 tokens, the context 8; shorten it to 7"):
            llm.stream(list(range(8)), faults.params)
        short = llm.stream([1, 2, 3], faults.params)
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
