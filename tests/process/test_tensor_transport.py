"""The shipped head over a real model: the same drafts whichever way its rows take, and whoever dies."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from executor import LLM, SamplingParams, Timeouts, process
from executor.errors import InvalidConfig
from ipc import memfd

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

WORKER = str(Path(__file__).with_name("fake_cuda_worker.py"))
PROMPT = "The capital of France is Paris. The capital of Germany is"
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
SECONDS = 60.0


@pytest.fixture
def with_fake_cuda(monkeypatch) -> Callable[..., None]:
    """Lanes that start from now on have a CUDA runtime, which fails as is said for each lane."""

    def start_with(**faults: Any) -> None:
        def command(lane, epoch, endpoint, death_fd):
            told = ["--lane", lane, "--epoch", epoch, "--endpoint", endpoint]
            told += ["--parent-pid", str(os.getpid()), "--death-fd", str(death_fd)]
            return [sys.executable, WORKER, json.dumps(faults), *told]

        monkeypatch.setattr(process, "command", command)

    return start_with


def heads(smollm2, **options: Any) -> LLM:
    """Drafts are always waited for, so that what is drafted hangs on nothing but the rows."""
    timeouts = Timeouts(draft=SECONDS, draft_least=SECONDS, hang=SECONDS, stop=20.0)
    common = {"speculator": "eagle", "threads": 1, "max_model_len": 128, "max_sequences": 2}
    return LLM(target=str(smollm2), **(common | {"timeouts": timeouts} | options))


def said(llm: LLM) -> tuple[list[int], dict[tuple[int, int], int]]:
    """Its tokens, and how its drafts fared: equal only if they were the same."""
    (done,) = llm.generate([PROMPT], PARAMS, progress=False)
    return done.token_ids, done.acceptance.outcomes


def mappings(pid: int, name: str) -> int:
    return len(re.findall(name, Path(f"/proc/{pid}/maps").read_text()))


def wait_for(condition: Callable[[], Any], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.002)


@pytest.fixture(scope="module")
def inline(smollm2):
    with heads(smollm2, transport="inline") as llm:
        assert llm.coordinator.transport == ("inline", "")
        return said(llm)


@pytest.mark.parametrize("victim", ["speculator", pytest.param("target", marks=pytest.mark.slow)])
def test_by_memfd_and_when_a_lane_was_killed(smollm2, inline, victim):
    """The survivor closes what it had mapped, the successor is joined, and nothing is left lent."""
    with heads(smollm2) as llm:
        assert llm.coordinator.transport.name == "memfd"
        assert said(llm) == inline
        transport = llm.coordinator._lanes.transport
        lanes = {lane.name: lane for lane in llm.coordinator.lanes}
        dead = lanes.pop(victim)
        (survivor,) = lanes.values()
        pid = survivor.process.pid
        assert mappings(pid, memfd.NAME) == 2  # its own, and the other lane's
        watch = os.pidfd_open(dead.process.pid)
        dead.process.kill(signal.SIGKILL)
        assert select.select([watch], [], [], SECONDS)[0]
        os.close(watch)
        wait_for(lambda: mappings(pid, memfd.NAME) == 1)
        wait_for(lambda: llm.coordinator.health.state == "healthy")
        wait_for(lambda: transport.arena_for(*llm.coordinator.lanes))
        assert said(llm)[0] == inline[0]  # what it drafts hangs on what it has learned by now
        counts = transport.leases.count()
        assert (counts["kept"], counts["quarantined"]) == (0, 0)


def test_by_cuda_ipc_with_a_runtime_that_is_none(smollm2, inline, with_fake_cuda):
    with_fake_cuda()
    with heads(smollm2, require_cuda_ipc=True) as llm:
        assert llm.coordinator.transport == ("cuda_ipc", "")
        assert all(mappings(lane.process.pid, "fake-device-memory") == 2 for lane in llm.coordinator.lanes)
        assert said(llm) == inline


@pytest.mark.slow
def test_what_a_stopped_lane_was_lent_is_quarantined_until_it_is_dead(smollm2, inline):
    timeouts = Timeouts(draft=1.0, hang=15.0, verify=SECONDS)
    with heads(smollm2, timeouts=timeouts) as llm:
        leases = llm.coordinator._lanes.transport.leases
        stream = iter(llm.stream(PROMPT, replace(PARAMS, max_tokens=100)))
        next(stream)
        (stopped,) = [lane.process for lane in llm.coordinator.lanes if lane.name == "speculator"]
        stopped.kill(signal.SIGSTOP)
        tokens = [token for delta in stream for token in delta.token_ids]
        assert tokens
        wait_for(lambda: leases.quarantines > 0)
        wait_for(lambda: llm.coordinator.deaths["speculator"] == 1)  # hung for too long
        wait_for(lambda: leases.count() == {"kept": 0, "lent": 0, "quarantined": 0})
        assert said(llm)[0] == inline[0]


@pytest.mark.slow
def test_a_loud_fallback_from_cuda_ipc(smollm2, inline, with_fake_cuda, caplog):
    with_fake_cuda(speculator={"fails": {"open": 201}})
    with caplog.at_level(logging.WARNING, "speclane"), heads(smollm2, speculator="cascade") as llm:
        name, reason = llm.coordinator.transport
        assert name == "memfd"
        assert "no cuda_ipc: the speculator cannot read the other lane's memory" in reason
        assert [line for line in caplog.messages if "event=transport_fallback transport=cuda_ipc" in line]
        assert said(llm)[0] == inline[0]


@pytest.mark.slow
def test_no_start_where_another_way_would_have_to_do(smollm2):
    with pytest.raises(
        InvalidConfig, match="require-cuda-ipc: the target: the lane runs on a CPU"
    ) as refusal:
        heads(smollm2, require_cuda_ipc=True).start()
    assert refusal.value.field == "require_cuda_ipc"
