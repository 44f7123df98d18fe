"""The shipped MPS topology with toys in it, on a stand-in for NVIDIA's programs: a daemon that misbehaves."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from launching import DRAFT, ROOT, SECONDS, free_port, launched, wait_for

DRIVER = Path(__file__).with_name("fake_driver")
UUID = "GPU-00000000-0000-0000-0000-000000000000"


@pytest.fixture
def topology() -> str:
    text = (ROOT / "deploy" / "topologies" / "one-gpu-mps.toml").read_text()
    for real, toy in (
        ("port = 8000", f"port = {free_port()}"),
        ('target = "smollm2-135m"', 'engine = "toy"\nthreads = 1\nmax_model_len = 512'),
        ('speculator = "cascade"', f'speculator = "{DRAFT}"'),
        ("mps = {}", 'mps = { compute_mode = "exclusive" }'),
    ):
        assert real in text
        text = text.replace(real, toy)
    return text


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    (tmp_path / "moods").mkdir()
    return {
        "PATH": f"{DRIVER}:{os.environ['PATH']}",
        "FAKE_MPS": str(tmp_path / "moods"),
        "FAKE_GPUS": "1",
    }


def test_lanes_are_clients_of_a_daemon_that_may_fail(topology, tmp_path, environment):
    moods = tmp_path / "moods"
    with launched(topology, tmp_path, environment) as launch:
        launch.until("healthy")
        directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "speclane.launch.one-gpu-mps"
        assert (directory / "mps-only").stat().st_mode & 0o777 == 0o700
        lanes = launch.of("main")["lanes"]
        seen = {name: environ(pid) for name, pid in lanes.items()}
        assert {each["CUDA_VISIBLE_DEVICES"] for each in seen.values()} == {UUID}
        assert {each["CUDA_MPS_PIPE_DIRECTORY"] for each in seen.values()} == {str(directory / "mps-only/p")}
        assert seen["speculator"]["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "30"
        assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" not in seen["target"]

        # One lane dies, so the other goes, too, but not before the daemon was asked to end its work.
        launch.kill(lanes["speculator"], signal.SIGABRT)
        wait_for(lambda: f"terminate_client 4242 {lanes['target']}" in asked(moods))
        wait_for(lambda: set(launch.of("main")["lanes"].values()).isdisjoint(lanes.values()))
        launch.until("healthy")
        assert launch.of("main")["starts"] == 1

        # The daemon dies: new clients would silently run without MPS, so all of its GPU start again.
        launch.kill(launch.of("mps-only")["pid"])
        launch.again("main", 2)
        assert launch.of("mps-only")["starts"] == 2
        assert "its MPS daemon mps-only died" in launch.said
        assert launch.stop() == 0
    assert asked(moods).splitlines()[-1] == f"{UUID} quit -t 5"
    assert (moods / "modes").read_text() == f"{UUID} EXCLUSIVE_PROCESS\n{UUID} DEFAULT\n"


def test_a_lane_that_is_no_client_is_not_served_in_silence(topology, tmp_path, environment):
    (tmp_path / "moods" / "unlisted").touch()
    with launched(topology.replace("mps = {", "mps = { patience = 0.5,"), tmp_path, environment) as launch:
        assert launch.process.wait(SECONDS) == 1
        assert (
            "is no client of the MPS daemon, so it runs without MPS; look at the daemon's log" in launch.said
        )


def test_a_daemon_that_ends_at_once_ends_the_launch(topology, tmp_path, environment):
    (tmp_path / "moods" / "absent").touch()
    with launched(topology, tmp_path, environment) as launch:
        assert launch.process.wait(SECONDS) == 1
        assert "mps-only exited with status 1: Cannot find MPS control daemon process" in launch.said
        assert "process_started name=main" not in launch.said


def environ(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_text()
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def asked(moods: Path) -> str:
    return (moods / "asked").read_text()
