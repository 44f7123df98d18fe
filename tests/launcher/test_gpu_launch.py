"""The shipped GPU topologies on real GPUs: where the lanes are, what they say, and who they die with."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from asking import text
from launching import ROOT, free_port, launched, wait_for

from executor.launch.topology import parse

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.model, pytest.mark.timeout(900)]
SECONDS = 600.0


def shipped(name: str) -> str:
    """The topology on a free port; skips where there are too few GPUs for it."""
    topology = (ROOT / "deploy" / "topologies" / f"{name}.toml").read_text()
    torch = pytest.importorskip("torch")
    needed = len(parse(topology).gpus)
    if torch.cuda.device_count() < needed:
        pytest.skip(f"{needed} GPUs are needed, there are {torch.cuda.device_count()}")
    assert "port = 8000" in topology
    return topology.replace("port = 8000", f"port = {free_port()}")


def uuids_of(pid: int) -> set[str]:
    """GPUs on which the driver counts memory for a process."""
    query = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
    return {row[1] for row in rows if row[0] == str(pid)}


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Path]:
    """Afterwards no process of the launch holds memory of a GPU."""
    yield tmp_path
    file = tmp_path / "state" / "status.json"
    if not file.exists():
        return  # it was skipped
    status = file.read_text()
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    left = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert [pid for pid in left if f": {pid}" in status] == []


def test_each_lane_has_the_gpu_that_the_topology_gives_it(quiet, smollm2):
    with launched(shipped("two-gpu"), quiet) as launch:
        launch.until("healthy", SECONDS)
        lanes = launch.of("main")["lanes"]
        target, speculator = uuids_of(lanes["target"]), uuids_of(lanes["speculator"])
        assert len(target) == len(speculator) == 1
        assert target != speculator
        said = text(launch.url(), SECONDS, temperature=0.0)
        launch.kill(lanes["speculator"])
        assert text(launch.url(), SECONDS, temperature=0.0) == said
        wait_for(
            lambda: launch.of("main")["lanes"].get("speculator") not in (None, lanes["speculator"]), SECONDS
        )
        assert launch.of("main")["lanes"]["target"] == lanes["target"]


def test_lanes_that_take_turns_die_alone(quiet, smollm2):
    with launched(shipped("one-gpu-timeslice"), quiet) as launch:
        launch.until("healthy", SECONDS)
        lanes = launch.of("main")["lanes"]
        said = text(launch.url(), SECONDS, temperature=0.0)
        launch.kill(lanes["speculator"])
        assert text(launch.url(), SECONDS, temperature=0.0) == said
        wait_for(
            lambda: launch.of("main")["lanes"].get("speculator") not in (None, lanes["speculator"]), SECONDS
        )
        assert launch.of("main")["lanes"]["target"] == lanes["target"]


def test_lanes_under_mps_are_its_clients_and_start_again_together(quiet, smollm2):
    with launched(shipped("one-gpu-mps"), quiet) as launch:
        launch.until("healthy", SECONDS)  # which they are only once the daemon lists them as its clients
        lanes = launch.of("main")["lanes"]
        said = text(launch.url(), SECONDS, temperature=0.0)
        launch.kill(lanes["speculator"])
        assert text(launch.url(), SECONDS, temperature=0.0) == said
        wait_for(lambda: set(launch.of("main")["lanes"].values()).isdisjoint(lanes.values()), SECONDS)
        launch.until("healthy", SECONDS)
        launch.kill(launch.of("mps-only")["pid"])
        launch.again("main", 2, SECONDS)
        assert text(launch.url(), SECONDS, temperature=0.0) == said


def test_a_target_of_two_ranks_has_two_gpus(quiet, smollm2):
    with launched(shipped("tp2-plus-draft"), quiet) as launch:
        launch.until("healthy", SECONDS)
        assert text(launch.url(), SECONDS, temperature=0.0)
