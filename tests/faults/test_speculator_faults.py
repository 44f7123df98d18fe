"""Whatever becomes of the speculator, the text is the same, the executor goes on, and drafts come back."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from executor import InvalidConfig, LaneFailed, Recovery, RestartPolicy
from executor.lane import LaneState
from ipc.messages import WIRE_VERSION

NEVER_AGAIN = Recovery(policy=RestartPolicy(intensity=0))


def workers(llm):
    target, speculator = llm.coordinator.lanes
    return target, speculator


def assert_goes_on(llm, undisturbed, faults) -> None:
    """A new request is served in full by what is left, or by what came back."""
    again = llm.generate(faults.prompt, faults.params)[0]
    assert again.token_ids == undisturbed.token_ids
    assert llm.coordinator.lanes[0].serving


def assert_comes_back(llm, dead, faults) -> None:
    """Another incarnation serves, and drafts of it are accepted."""
    faults.wait_until_healthy(llm)
    assert workers(llm)[1].epoch != dead.epoch
    assert llm.generate(faults.prompt, faults.params)[0].acceptance_length > 1.0


def test_killed_while_it_drafts(faults, undisturbed):
    with faults.toys(speculator="vocabulary=256,agree=0.8,step_ms=20") as llm:
        target, speculator = workers(llm)
        stream = llm.stream(faults.prompt, faults.params)
        tokens = []
        for delta in stream:
            tokens += delta.token_ids
            if speculator.serving:
                faults.wait_for(lambda: speculator.in_flight is not None)
                speculator.process.kill(signal.SIGKILL)
                faults.wait_for(lambda: speculator.state is LaneState.DOWN)
        assert tokens == undisturbed.token_ids
        assert stream.completion.text == undisturbed.text
        assert speculator.down_because == "killed by SIGKILL"
        assert llm.coordinator.stats.missed == 1
        assert_comes_back(llm, speculator, faults)
        assert_goes_on(llm, undisturbed, faults)
        assert target.down_because == ""


def test_a_lane_without_a_process_never_seems_to_serve(faults, monkeypatch):
    """Other threads read both at any time, while the one that buries is somewhere in between."""
    seen = []
    with faults.toys() as llm:
        _, speculator = workers(llm)
        close = speculator.process.close
        monkeypatch.setattr(
            speculator.process,
            "close",
            lambda: (seen.append((speculator.process is None, speculator.serving)), close()),
        )
        speculator.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: speculator.process is None)
        assert not speculator.serving
        faults.wait_until_healthy(llm)
        assert workers(llm)[1] is not speculator
    assert seen == [(False, True)]


def test_killed_while_idle(faults, undisturbed):
    with faults.toys() as llm:
        _, speculator = workers(llm)
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        speculator.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: speculator.state is LaneState.DOWN)
        assert speculator.down_because == "killed by SIGKILL"
        assert speculator.process is None
        assert_goes_on(llm, undisturbed, faults)
        assert_comes_back(llm, speculator, faults)
        assert llm.coordinator.deaths == {"target": 0, "speculator": 1}


def test_given_up_and_the_target_goes_on_alone(faults, undisturbed):
    with faults.toys(recovery=NEVER_AGAIN) as llm:
        _, speculator = workers(llm)
        speculator.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: speculator.state is LaneState.DOWN)
        completion = llm.generate(faults.prompt, faults.params)[0]
        assert completion.token_ids == undisturbed.token_ids
        assert completion.acceptance_length == 1.0
        assert workers(llm)[1] is speculator
        assert llm.coordinator.health.state == "degraded"
        assert llm.coordinator.health.reason == "speculator lane down: killed by SIGKILL"


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM])
def test_other_deaths_are_named(faults, undisturbed, number):
    with faults.toys() as llm:
        _, speculator = workers(llm)
        speculator.process.kill(number)
        faults.wait_for(lambda: speculator.state is LaneState.DOWN)
        assert speculator.down_because == f"killed by {number.name}"
        if number is not signal.SIGTERM:
            assert (
                "Fatal Python error" in speculator.stderr_tail
            )  # where it was, for whoever must find out why
        assert_goes_on(llm, undisturbed, faults)


def test_stopped_then_continued(faults, undisturbed):
    """Rounds go on plain within the draft deadline; the late answer is dropped and counted; drafts resume."""
    params = replace(faults.params, max_tokens=4000)
    with faults.toys(timeouts={"draft": 0.2}, max_sequences=1) as llm:
        _, speculator = workers(llm)
        stats = llm.coordinator.stats
        stream = llm.stream(faults.prompt, params)
        tokens, state, mark = [], "running", 0
        for delta in stream:
            tokens += delta.token_ids
            if state == "running":
                speculator.process.kill(signal.SIGSTOP)
                state = "stopped"
            elif state == "stopped" and stats.missed:
                assert speculator.serving
                assert not speculator.idle
                speculator.process.kill(signal.SIGCONT)
                state = "continued"
            elif state == "continued" and llm.coordinator.stale:
                state, mark = "answered", sum(stats.acceptance.drafted)
            elif state == "answered" and sum(stats.acceptance.drafted) > mark:
                state = "resumed"
                break
        assert state == "resumed"
        assert llm.coordinator.stale == 1
        assert stats.missed == 1
        shorter = min(len(tokens), len(undisturbed.token_ids))
        assert tokens[:shorter] == undisturbed.token_ids[:shorter]
        assert_goes_on(llm, undisturbed, faults)


def test_stopped_for_good_is_killed_after_the_hang_limit(faults, undisturbed):
    with faults.toys(target="vocabulary=256,step_ms=10", timeouts={"draft": 0.1, "hang": 0.4}) as llm:
        _, speculator = workers(llm)
        speculator.process.kill(signal.SIGSTOP)
        completion = llm.generate(faults.prompt, faults.params)[0]
        assert completion.token_ids == undisturbed.token_ids
        faults.wait_for(lambda: speculator.state is LaneState.DOWN)
        assert speculator.down_because == "no draft within 0.4 s"
        assert_comes_back(llm, speculator, faults)
        assert llm.coordinator.stats.missed == 1
        assert_goes_on(llm, undisturbed, faults)


def test_how_long_a_stopped_one_is_waited_for_follows_from_its_drafts(faults, undisturbed):
    """Were it the limit of the settings, this test would not end in time."""
    with faults.toys(timeouts={"draft": 1000.0, "draft_least": 0.01, "hang": 1000.0}) as llm:
        _, speculator = workers(llm)
        assert llm.generate(faults.prompt, faults.params)[0].acceptance_length > 1.0
        speculator.process.kill(signal.SIGSTOP)
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        assert llm.coordinator.stats.missed >= 1
        assert speculator.serving
        speculator.process.kill(signal.SIGCONT)
        faults.wait_for(lambda: llm.generate(faults.prompt, faults.params)[0].acceptance_length > 1.0)


@pytest.mark.parametrize(
    ("behaviour", "because"),
    [
        ("garbage", "sent a malformed frame"),
        ("a pickle", "sent a malformed frame"),
        ("two frames", "sent a malformed frame (2 frames instead of one)"),
        ("huge claim", "sent a malformed frame"),
        ("answers as the other", "link to the speculator: Verified is not legal in state busy"),
        ("answers twice", "link to the speculator: Drafted is not legal in state idle"),
        ("fails", "out of memory"),
        ("fails when told", "no room"),
    ],
)
def test_a_speculator_that_breaks_the_protocol_is_taken_down(faults, fake, undisturbed, behaviour, because):
    fake("speculator", behaviour)
    with faults.toys(recovery=NEVER_AGAIN) as llm:
        _, speculator = workers(llm)
        completion = llm.generate(faults.prompt, faults.params)[0]
        assert completion.token_ids == undisturbed.token_ids
        faults.wait_for(lambda: speculator.state is LaneState.DOWN)
        assert because in speculator.down_because
        assert llm.coordinator._lanes.counts.garbled == ("malformed" in because)
        assert_goes_on(llm, undisturbed, faults)


@pytest.mark.parametrize("behaviour", ["garbage", "fails", "fails when told"])
def test_a_sequence_over_which_the_speculator_dies_again_and_again(faults, fake, undisturbed, behaviour):
    """It goes on without drafts, and the speculator is left in peace."""
    fake("speculator", behaviour)
    recovery = Recovery(policy=RestartPolicy(backoff=0.01))
    params = replace(faults.params, max_tokens=4000)
    with faults.toys(recovery=recovery, target="vocabulary=256,step_ms=2") as llm:
        stats, tokens = llm.coordinator.stats, []
        for delta in llm.stream(faults.prompt, params):
            tokens += delta.token_ids
            if stats.quarantined and llm.coordinator.health.state == "healthy" and len(tokens) > 120:
                break
        assert tokens[:120] == undisturbed.token_ids
        assert (stats.quarantined, llm.coordinator.deaths["speculator"]) == (1, 3)


@pytest.mark.parametrize(
    ("behaviour", "counted"),
    [
        ("past generation", "stale"),
        ("past length", "stale"),
        ("strange sequence", "stale"),
        ("no items", None),
        ("empty drafts", None),
    ],
)
def test_drafts_that_do_not_fit_are_dropped_and_counted(faults, fake, undisturbed, behaviour, counted):
    fake("speculator", behaviour)
    with faults.toys() as llm:
        completion = llm.generate(faults.prompt, faults.params)[0]
        assert completion.token_ids == undisturbed.token_ids
        assert completion.acceptance_length == 1.0
        stats, orders = llm.coordinator.stats, workers(llm)[1].orders
        assert orders == 119  # the last token needs no draft
        assert (llm.coordinator.stale, stats.invalid) == (orders if counted else 0, 0)
        assert workers(llm)[1].serving


@pytest.mark.parametrize("behaviour", ["too many tokens", "foreign token", "negative token"])
def test_a_draft_that_cannot_be_quarantines_its_sequence_alone(faults, fake, undisturbed, behaviour):
    fake("speculator", behaviour)
    with faults.toys() as llm:
        for done in (1, 2):  # the next sequence is believed again
            completion = llm.generate(faults.prompt, faults.params)[0]
            assert completion.token_ids == undisturbed.token_ids
            assert completion.acceptance_length == 1.0
            stats = llm.coordinator.stats
            assert stats.invalid == stats.quarantined == workers(llm)[1].orders == done
        assert workers(llm)[1].serving


def test_an_answer_of_a_past_epoch_is_dropped_and_the_right_one_counts(faults, fake, undisturbed):
    fake("speculator", "past epoch")
    with faults.toys() as llm:
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        counts, stats = llm.coordinator._lanes.counts, llm.coordinator.stats
        assert counts.strangers == workers(llm)[1].orders
        assert (counts.stale, stats.missed, stats.invalid) == (0, 0, 0)
        assert sum(stats.acceptance.drafted) > 0


def test_an_answer_to_a_past_order_is_dropped_and_counted(faults, fake, undisturbed):
    """The order in flight is then one that was never answered: its deadline passes."""
    params = replace(faults.params, max_tokens=5)
    fake("speculator", "past order")
    with faults.toys(timeouts={"draft": 0.05}) as llm:
        assert llm.generate(faults.prompt, params)[0].token_ids == undisturbed.token_ids[:5]
        assert llm.coordinator.stale == llm.coordinator.stats.missed == 4


def test_a_flood_on_stderr_blocks_nothing(faults, fake, undisturbed):
    fake("speculator", "shouts")
    params = replace(faults.params, max_tokens=12)
    with faults.toys() as llm:
        assert llm.generate(faults.prompt, params)[0].token_ids == undisturbed.token_ids[:12]
        speculator = workers(llm)[1]
    assert speculator.stderr_tail.endswith("noise")
    assert len(speculator.stderr_tail) <= 4096


@pytest.mark.parametrize(
    ("behaviour", "reason", "tail"),
    [
        ("dies at boot", "exited with status 1", "the fake worker was told to die"),
        ("exits at boot", "exited with status 0", ""),
        ("garbage at boot", "sent a malformed frame", ""),
        ("another wire version", f"speaks wire version {WIRE_VERSION + 1}, this is {WIRE_VERSION}", ""),
        ("greets as the other", "greets as", ""),
    ],
)
@pytest.mark.parametrize("lane", ["target", "speculator"])
def test_a_worker_that_does_not_come_up(faults, fake, lane, behaviour, reason, tail):
    fake(lane, behaviour)
    with pytest.raises(LaneFailed, match=f"^{lane} lane failed: ") as failure:
        faults.toys().start()
    assert reason in failure.value.reason
    assert tail in failure.value.stderr_tail


@pytest.mark.parametrize("lane", ["target", "speculator"])
def test_a_worker_that_cannot_become_what_it_was_told(faults, fake, lane):
    fake(lane, "fails at load")
    with pytest.raises(InvalidConfig, match=f"^{lane}: no such weights") as refusal:
        faults.toys().start()
    assert refusal.value.field == lane


@pytest.mark.parametrize("lane", ["target", "speculator"])
def test_a_worker_that_never_speaks(faults, fake, lane):
    fake(lane, "never greets")
    with pytest.raises(LaneFailed, match=f"{lane} lane failed: not ready in time, in phase start"):
        faults.toys(timeouts={"load": 1.0, "stop": 0.3}).start()
