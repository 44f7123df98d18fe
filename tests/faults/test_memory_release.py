"""A lane starts again only once the GPU memory of the one that died is free, or has not been for too long."""

from __future__ import annotations

import logging
import signal

import pytest

from executor import gpu_memory, supervisor


@pytest.fixture
def held(monkeypatch):
    """`held(times)`: so often the driver says that the memory is still held; returns who was asked about."""

    def install(times: int) -> list[int]:
        asked: list[int] = []

        def held_by(pid: int) -> bool:
            asked.append(pid)
            return len(asked) <= times

        monkeypatch.setattr(gpu_memory, "held_by", held_by)
        return asked

    return install


@pytest.mark.parametrize("name", ["target", "speculator"])
def test_the_successor_waits_until_it_is_free(faults, held, undisturbed, name, caplog):
    asked = held(times=3)
    with faults.toys() as llm:
        lane = next(lane for lane in llm.coordinator.lanes if lane.name == name)
        pid = lane.process.pid
        lane.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: lane.process is None)
        faults.wait_until_healthy(llm)
        assert asked == [pid] * 4
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
    assert "memory_not_released" not in caplog.text


def test_but_not_for_ever(faults, held, undisturbed, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "_RELEASE_SECONDS", 0.2)
    asked = held(times=10**9)
    with faults.toys() as llm, caplog.at_level(logging.WARNING, logger="speclane"):
        speculator = llm.coordinator.lanes[1]
        pid = speculator.process.pid
        speculator.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: speculator.process is None)
        faults.wait_until_healthy(llm)
        assert set(asked) == {pid}
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
    assert caplog.text.count(f"event=memory_not_released lane=speculator pid={pid}") == 1
