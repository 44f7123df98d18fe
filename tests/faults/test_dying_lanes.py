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
PARAMS = SamplingParams(temperature=0.0, max_tokens=20)
OWN, BOTH = 1, 2


def mapped(lane: Lane) -> int:
    """How many arenas a lane has."""
    assert lane.process is not None
    return Path(f"/proc/{lane.process.pid}/maps").read_text().count(memfd.NAME)


DRAFTS = {"speculator": f"{LARGE},agree=0.5", "acceptance": "rejection", "q_rows": "full"}


@pytest.fixture
def llm(faults) -> Iterator:
    with faults.toys(target=LARGE, num_speculative_tokens=2, **DRAFTS) as llm:
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


def test_of_a_group_the_one_that_exports_may_be_the_last_to_go(faults):
    with faults.toys(target=LARGE, target_ranks=2, num_speculative_tokens=2, **DRAFTS) as llm:
        target, speculator = llm.coordinator.lanes
        first, second = target.process.ranks
        assert (mapped(target), mapped(speculator)) == (BOTH, BOTH)
        with held_at_the_door(first.pid) as is_there:
            second.kill()
            is_there()
            faults.wait_for(lambda: mapped(speculator) == OWN)
        faults.wait_for(lambda: llm.coordinator.deaths["target"] == 1)
        faults.wait_until_healthy(llm)
        faults.wait_for(lambda: mapped(speculator) == BOTH)
