"""A spare takes over without a load, another one follows; lanes of one group start again together."""

from __future__ import annotations

import logging
import signal
from dataclasses import replace

import pytest

from executor import Recovery, RestartPolicy, process

POLICY = RestartPolicy(intensity=100, backoff=0.01, backoff_max=0.05)
LANES = ("target", "speculator")


@pytest.fixture
def spared(faults):
    """Toys with spares that serve."""

    def make(*standby, policy=POLICY, **options):
        recovery = Recovery(policy=policy, standby=standby)
        llm = faults.toys(target="vocabulary=256,step_ms=2", recovery=recovery, **options)
        llm.start()
        for name in standby:
            faults.wait_for(lambda name=name: spare(llm, name) is not None and spare(llm, name).serving)
        return llm

    return make


def spare(llm, name):
    return llm.coordinator._lanes.supervisor._spares.get(name)


def current(llm, name):
    return llm.coordinator._lanes.supervisor.current[name]


@pytest.mark.parametrize("name", LANES)
def test_the_spare_takes_over_and_another_follows(faults, spared, undisturbed, name, caplog):
    caplog.set_level(logging.INFO, logger="speclane")
    other = next(lane for lane in LANES if lane != name)
    with spared(name) as llm:
        survivor = current(llm, other)
        for _ in range(3):
            first, second = current(llm, name), spare(llm, name)
            tokens = []
            for delta in llm.stream(faults.prompt, faults.params):
                if not tokens:
                    first.process.kill(signal.SIGKILL)
                tokens += delta.token_ids
            assert tokens == undisturbed.token_ids
            assert current(llm, name) is second
            assert second.serving
            faults.wait_for(lambda second=second: spare(llm, name) not in (None, second))
            faults.wait_for(lambda: spare(llm, name).serving)
        again = llm.generate(faults.prompt, faults.params)[0]
        assert again.acceptance_length > 1.0
        assert current(llm, other) is survivor
        assert llm.coordinator.deaths[name] == 3
        assert llm.coordinator.health.state == "healthy"
        # Never were answers paused, never did drafts wait for a load.
        assert "now=recovering" not in caplog.text
        assert "now=degraded" not in caplog.text


@pytest.mark.parametrize(
    ("name", "timeouts"), [("target", {"verify": 0.5}), ("speculator", {"draft": 0.1, "hang": 0.5})]
)
def test_the_spare_does_not_wait_for_the_end_of_a_lane_that_hangs(
    faults, spared, undisturbed, name, timeouts, caplog
):
    caplog.set_level(logging.INFO, logger="speclane")
    with spared(name, timeouts=timeouts) as llm:
        hung, second = current(llm, name), spare(llm, name)
        hung.process.kill(signal.SIGSTOP)
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        faults.wait_for(lambda: hung.process is None and spare(llm, name).serving)
        assert current(llm, name) is second
        assert spare(llm, name) is not hung
        assert llm.coordinator.deaths[name] == 1
    events = [line for line in caplog.messages if "lane_promoted" in line or "lane_died" in line]
    assert [line.split()[0] for line in events] == ["event=lane_promoted", "event=lane_died"]


@pytest.fixture
def delayed(monkeypatch, tmp_path):
    """`delayed()`: workers started from now on begin only when the function returned is called."""
    go = tmp_path / "go"
    wait = ("sh", "-c", 'while [ ! -e "$0" ]; do sleep 0.05; done; exec "$@"', str(go))

    def install():
        real = process.command
        monkeypatch.setattr(process, "command", lambda *rest: [*wait, *real(*rest)])
        return go.touch

    return install


@pytest.mark.parametrize("name", LANES)
def test_a_spare_that_comes_late_takes_over_before_the_lane_may_start_again(
    faults, spared, delayed, undisturbed, name
):
    for_ever = RestartPolicy(intensity=100, backoff=1000.0, backoff_max=1000.0)
    with spared(name, policy=for_ever) as llm:
        first, second = current(llm, name), spare(llm, name)
        let_go = delayed()
        first.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: spare(llm, name) not in (first, second))
        third = spare(llm, name)
        second.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: second.process is None)
        assert current(llm, name) is second
        let_go()
        faults.wait_for(lambda: current(llm, name) is third)
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        assert third.serving


@pytest.mark.parametrize("name", LANES)
def test_a_spare_that_dies_is_replaced_and_nobody_notices(faults, spared, undisturbed, name):
    with spared(*LANES) as llm:
        before = llm.coordinator.lanes
        dead = spare(llm, name)
        dead.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: spare(llm, name) is not dead and spare(llm, name).serving)
        assert llm.coordinator.lanes == before
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids


@pytest.mark.parametrize("name", LANES)
def test_lane_and_spare_die_together(faults, spared, undisturbed, name):
    """Whichever is seen first, both are back at last, and each once."""
    with spared(name) as llm:
        dead = current(llm, name), spare(llm, name)
        tokens = []
        for delta in llm.stream(faults.prompt, faults.params):
            if not tokens:
                for lane in dead:
                    lane.process.kill(signal.SIGKILL)
            tokens += delta.token_ids
        assert tokens == undisturbed.token_ids
        faults.wait_for(lambda: current(llm, name).serving and spare(llm, name) not in (None, *dead))
        faults.wait_for(lambda: spare(llm, name).serving)
        assert llm.coordinator.deaths[name] == 2
        assert len(llm.coordinator._lanes.supervisor._alive) == 3


@pytest.mark.parametrize("name", LANES)
def test_a_spare_dies_while_its_lane_waits_to_be_started_again(faults, fake, undisturbed, name):
    policy = RestartPolicy(intensity=100, backoff=0.5, backoff_max=0.5)
    with faults.toys(recovery=Recovery(policy=policy, standby=(name,))) as llm:
        faults.wait_for(lambda: spare(llm, name).serving)
        first, lane = spare(llm, name), current(llm, name)
        fake(name, "never greets")
        first.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: spare(llm, name) is not first and spare(llm, name).process is not None)
        second = spare(llm, name)
        lane.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: lane.process is None)
        second.process.kill(signal.SIGKILL)
        fake("nobody", "sound from now on")
        faults.wait_for(lambda: current(llm, name).serving and spare(llm, name) is not second)
        faults.wait_for(lambda: spare(llm, name).serving)
        assert llm.coordinator.deaths[name] == 3
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids


@pytest.mark.parametrize("name", LANES)
def test_lanes_of_one_group_start_again_together(faults, undisturbed, name):
    recovery = Recovery(policy=POLICY, group="one_for_all")
    with faults.toys(target="vocabulary=256,step_ms=2", recovery=recovery) as llm:
        before = {lane.name: lane for lane in llm.coordinator.lanes}
        tokens = []
        for delta in llm.stream(faults.prompt, faults.params):
            if not tokens:
                before[name].process.kill(signal.SIGKILL)
            tokens += delta.token_ids
        assert tokens == undisturbed.token_ids
        faults.wait_until_healthy(llm)
        other = next(lane for lane in LANES if lane != name)
        assert before[name].down_because == "killed by SIGKILL"
        assert before[other].down_because == f"ended together with the {name} lane"
        assert not {lane.epoch for lane in llm.coordinator.lanes} & {lane.epoch for lane in before.values()}
        assert llm.coordinator.deaths == {"target": 1, "speculator": 1}
        params = replace(faults.params, max_tokens=60)
        assert llm.generate(faults.prompt, params)[0].acceptance_length > 1.0
