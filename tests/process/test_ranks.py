"""A target of several ranks: one lane for all who deal with it, whichever of its processes dies."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from executor import LLM, Config, InvalidConfig, LaneFailed, Recovery, SamplingParams, Timeouts, process
from executor.cli.status import rows
from executor.rundir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

PARAMS = SamplingParams(max_tokens=60, temperature=0.9, seed=5)
PROMPTS = ["one", "two words", "three more words"]
DRAFT = "vocabulary=256,agree=0.8"
LONG = Timeouts(draft=60.0, draft_least=60.0, hang=60.0, stop=20.0)


def toys(**options: Any) -> LLM:
    return LLM(**({"engine": "toy", "speculator": DRAFT, "threads": 1, "timeouts": LONG} | options))


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """What a target of one rank says without speculation."""
    with toys(speculator="off") as llm:
        return [done.token_ids for done in llm.generate(PROMPTS, PARAMS)]


def test_ranks_say_what_one_says(alone):
    with toys(target_ranks=3) as llm:
        assert [done.token_ids for done in llm.generate(PROMPTS, PARAMS)] == alone
        llm.swap_speculator("off")
        assert [done.token_ids for done in llm.generate(PROMPTS, PARAMS)] == alone
        group = llm.coordinator.lanes[0].process
        assert len(set(group.pids)) == 3
        assert group.pids[0] == group.pid
        # Nothing listens where another user could reach it.
        assert not any(psutil.Process(pid).net_connections("inet") for pid in group.pids)


@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_a_rank_is_that_of_the_lane(alone, rank):
    with toys(target_ranks=2) as llm:
        streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
        first = iter(streams[0])
        next(first)
        group = llm.coordinator.lanes[0].process
        group.ranks[rank].kill()
        for stream in (first, *streams[1:]):
            for _ in stream:
                pass
        assert [stream.completion.token_ids for stream in streams] == alone
        assert llm.coordinator.deaths == {"target": 1, "speculator": 0}
        assert not any(psutil.pid_exists(pid) for pid in group.pids)
        successor = llm.coordinator.lanes[0].process
        assert len(successor.pids) == 2
        assert not set(successor.pids) & set(group.pids)


def test_it_is_said_which_rank_died(alone):
    with toys(target_ranks=2) as llm:
        lane = llm.coordinator.lanes[0]
        lane.process.ranks[1].kill(signal.SIGSEGV)
        assert [done.token_ids for done in llm.generate(PROMPTS, PARAMS)] == alone
        assert lane.down_because == "rank 1 killed by SIGSEGV"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_ended_with_its_lane(alone, rank):
    with toys(target_ranks=2, timeouts=Timeouts(draft=60.0, draft_least=60.0, hang=60.0, verify=2.0)) as llm:
        streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
        first = iter(streams[0])
        next(first)
        llm.coordinator.lanes[0].process.ranks[rank].kill(signal.SIGSTOP)
        for stream in (first, *streams[1:]):
            for _ in stream:
                pass
        assert [stream.completion.token_ids for stream in streams] == alone
        assert llm.coordinator.deaths["target"] == 1


def test_a_rank_that_hangs_while_idle_is_noticed(wait_for):
    with toys(target_ranks=2) as llm:
        lane = llm.coordinator.lanes[0]
        lane.process.ranks[1].kill(signal.SIGSTOP)
        wait_for(lambda: llm.coordinator.deaths["target"] == 1)
        assert lane.down_because == "idle and silent for 5 s"


def test_a_rank_that_cannot_start_is_the_lane_s_failure(monkeypatch):
    real = process.command

    def command(*arguments: Any) -> list[str]:
        whole = real(*arguments)
        if "--rank" in whole and whole[whole.index("--rank") + 1] == "1":
            return [sys.executable, "-c", "raise SystemExit('no such luck')"]
        return whole

    monkeypatch.setattr(process, "command", command)
    with pytest.raises(LaneFailed, match="target lane failed: rank 1 exited with status 1") as failed:
        toys(target_ranks=2).start()
    assert failed.value.stderr_tail == "no such luck"


def test_a_spare_of_several_ranks_takes_over(alone, wait_for):
    with toys(target_ranks=2, recovery=Recovery(standby=("target",))) as llm:
        assert [lane.copies for lane in llm.coordinator.memory.lanes] == [2, 2, 1]
        spares = llm.coordinator._lanes.supervisor._spares
        wait_for(lambda: "target" in spares and spares["target"].serving)
        spare = spares["target"]
        llm.coordinator.lanes[0].process.ranks[1].kill()
        assert [done.token_ids for done in llm.generate(PROMPTS, PARAMS)] == alone
        assert llm.coordinator.lanes[0] is spare


def test_each_rank_has_a_row_in_the_plan():
    done = _speclane("plan", "--target-ranks", "2", "--json")
    plan = json.loads(done.stdout)
    assert [(lane["lane"], lane["rank"]) for lane in plan["lanes"]] == [
        ("target", 0),
        ("target", 1),
        ("speculator", 0),
    ]
    assert all(lane["kv_tokens"] == plan["tokens"] for lane in plan["lanes"])
    table = _speclane("plan", "--target-ranks", "2").stdout
    assert "target/1 (cpu)" in table


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target_ranks": 0}, "target-ranks must be a whole number from 1 to 16, got 0; try 2"),
        (
            {"target_ranks": 2, "engine": "hf"},
            "target-ranks 2 needs engine native, got hf; try --engine native, or --target-ranks 1",
        ),
        (
            {"target_ranks": 2, "lanes": "inline"},
            "target-ranks 2 needs lanes process, got inline; try --lanes process, or --target-ranks 1",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(options, says):
    with pytest.raises(InvalidConfig) as refused:
        Config(**options)
    assert (refused.value.field, str(refused.value)) == ("target_ranks", says)


def test_the_status_names_every_process():
    with toys(target_ranks=2) as llm:
        target, speculator = llm.status().lanes
        group = llm.coordinator.lanes[0].process
        assert (target.pid, *target.peers) == group.pids
        assert speculator.peers == []
        assert f"pid {group.pids[0]}, {group.pids[1]}" in rows(llm.status())[0]


def test_threads_of_a_lane_are_shared_by_its_ranks():
    with toys(target_ranks=2, threads=3, speculator=DRAFT) as llm:
        assert [lane.spec.threads for lane in llm.coordinator.lanes] == [1, 3]
        environments = [psutil.Process(pid).environ() for pid in llm.coordinator.lanes[0].process.pids]
        assert [environment["OMP_NUM_THREADS"] for environment in environments] == ["1", "1"]


def test_what_the_ranks_of_a_killed_executor_left_is_swept():
    script = (
        "from executor import LLM\n"
        "llm = LLM(engine='toy', speculator='off', threads=1, target_ranks=2).start()\n"
        "print(*llm.coordinator.lanes[0].process.pids, flush=True)\n"
        "input()\n"
    )
    killed = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdin is not None
    pids = [int(pid) for pid in killed.stdout.readline().split()]
    ended = [os.pidfd_open(pid) for pid in pids]
    killed.kill()
    killed.wait()
    for pidfd in ended:
        _wait_for_end(pidfd)
    killed.stdin.close()
    killed.stdout.close()
    RunDir().remove()  # sweeps; that nothing is left is checked for every test


def _wait_for_end(pidfd: int) -> None:
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    assert poller.poll(10_000)
    os.close(pidfd)


def _speclane(*arguments: str) -> subprocess.CompletedProcess[str]:
    toy = ("--engine", "toy", "--target", "vocabulary=128,context=512", "--speculator", "vocabulary=128")
    return subprocess.run(
        [sys.executable, "-m", "executor", *arguments, *toy],
        capture_output=True,
        text=True,
        timeout=60.0,
        check=True,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def wait_for() -> Callable[..., None]:
    def wait(condition: Callable[[], Any], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the condition did not come true in time"
            time.sleep(0.005)

    return wait
