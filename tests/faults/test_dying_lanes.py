"""A lane that is being killed: the others let go of its memory while it still has it, not when it is gone."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from at_the_door import held_at_the_door

from executor import SamplingParams
from ipc import memfd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from executor.lane import Lane

LARGE = "vocabulary=17000"
PARAMS = SamplingParams(temperature=0.9, top_k=1, max_tokens=5)
OWN, BOTH = 1, 2


def mapped(lane: Lane) -> int:
    """How many arenas a lane has."""
    assert lane.process is not None
    return Path(f"/proc/{lane.process.pid}/maps").read_text().count(memfd.NAME)


@pytest.fixture
def llm(faults) -> Iterator:
    drafts = {"speculator": f"{LARGE},agree=0.5", "acceptance": "rejection", "q_rows": "full"}
    with faults.toys(target=LARGE, num_speculative_tokens=2, **drafts) as llm:
        yield llm


def end(llm, lane: Lane) -> None:
    """The coordinator does it."""
    lanes = llm.coordinator._lanes
    llm.coordinator._leave(
        lambda: llm.coordinator._errands.append(lambda: lanes.supervisor.take_down(lane, "a test says so"))
    )


def kill(llm, lane: Lane) -> None:
    """Somebody else does it."""
    lane.process.kill(signal.SIGKILL)


@pytest.mark.parametrize("act", [kill, end])
@pytest.mark.parametrize("victim", ["target", "speculator"])
def test_the_survivor_lets_go_before_the_death_is_over(faults, llm, victim, act: Callable):
    lanes = {lane.name: lane for lane in llm.coordinator.lanes}
    dying = lanes.pop(victim)
    (survivor,) = lanes.values()
    assert (mapped(dying), mapped(survivor)) == (BOTH, BOTH)
    expected = llm.generate(faults.prompt, PARAMS)[0]
    pidfd = os.pidfd_open(dying.process.pid)
    try:
        with held_at_the_door(dying.process.pid) as is_there:
            act(llm, dying)
            is_there()
            faults.wait_for(lambda: mapped(survivor) == OWN)
            assert not select.select([pidfd], [], [], 0)[0]
            assert llm.coordinator.deaths[victim] == 0
        faults.wait_for(lambda: llm.coordinator.deaths[victim] == 1)
    finally:
        os.close(pidfd)
    faults.wait_until_healthy(llm)
    faults.wait_for(lambda: mapped(survivor) == BOTH)
    assert llm.generate(faults.prompt, PARAMS)[0].token_ids == expected.token_ids
