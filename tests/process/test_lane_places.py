"""Lanes in places of their own: what their real processes find, also after a death and after a swap."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from serving import ask, served, wait_for

from executor import LLM
from executor.notify import parse

UUID = "GPU-8a3c1f2e-0000-4444-8888-0123456789ab"


def environment(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def pids(llm: LLM) -> dict[str, int]:
    return {lane.lane: lane.pid for lane in llm.status().lanes}


def test_each_lane_finds_its_own(monkeypatch):
    monkeypatch.setenv("INHERITED", "yes")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/notify")
    core = min(os.sched_getaffinity(0))
    before = os.sched_getaffinity(0)
    options = {"engine": "toy", "speculator": "vocabulary=256", "target_env": ("A=1",)}
    with LLM(**options, speculator_device=UUID, speculator_cores=str(core)) as llm:
        first = pids(llm)
        target, speculator = environment(first["target"]), environment(first["speculator"])
        assert (target["A"], target["CUDA_VISIBLE_DEVICES"]) == ("1", "7")
        assert ("A" in speculator, speculator["CUDA_VISIBLE_DEVICES"]) == (False, UUID)
        assert (target["INHERITED"], speculator["INHERITED"]) == ("yes", "yes")
        assert "NOTIFY_SOCKET" not in target
        assert speculator["OMP_NUM_THREADS"] == "1"
        assert os.sched_getaffinity(first["speculator"]) == {core}
        assert os.sched_getaffinity(first["target"]) == before
        os.kill(first["speculator"], 9)
        wait_for(lambda: pids(llm)["speculator"] not in (None, first["speculator"]))
        # Until it is executed, a new process still has the environment of this one.
        again = pids(llm)["speculator"]
        wait_for(lambda: environment(again).get("CUDA_VISIBLE_DEVICES") == UUID)
        llm.swap_speculator("ngram")
        swapped = pids(llm)["speculator"]
        assert environment(swapped)["CUDA_VISIBLE_DEVICES"] == UUID
        assert os.sched_getaffinity(swapped) == {core}


def test_a_server_says_how_it_is(tmp_path, monkeypatch):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ear:
        ear.bind(path)
        ear.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        monkeypatch.setenv("WATCHDOG_USEC", "4000000")
        with served() as server:
            said = parse(ear.recv(4096))
            assert said["READY"] == "1"
            assert said["X_SPECLANE_HEALTH"] == "healthy"
            assert said["X_SPECLANE_URL"] == server.url
            lanes = dict(pair.split(":") for pair in said["X_SPECLANE_LANES"].split(","))
            assert {name: int(pid) for name, pid in lanes.items()} == pids(server.llm)
            assert parse(ear.recv(4096)) == {"WATCHDOG": "1"}
            assert ask(server.url, "/ready").status == 200
            os.kill(int(lanes["speculator"]), 9)
            while "X_SPECLANE_LANES" not in (said := parse(ear.recv(4096))):
                pass
            assert lanes["speculator"] not in said["X_SPECLANE_LANES"]
        while "STOPPING" not in parse(ear.recv(4096)):
            pass
