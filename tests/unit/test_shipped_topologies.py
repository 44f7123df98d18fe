"""The topologies that are shipped: what `--dry-run` shows of each on a machine with four GPUs, to the letter.

After an intended change: `SPECLANE_WRITE_GOLDEN=1 pytest tests/unit/test_shipped_topologies.py`, and read the
difference.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from executor import doctor
from executor.doctor import Gpu, Machine
from executor.launch import preflight
from executor.launch.plan import make_plan
from executor.launch.preflight import Surroundings
from executor.launch.show import show, show_findings
from executor.launch.topology import read

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "deploy" / "topologies").glob("*.toml"))
GOLDEN = Path(__file__).with_name("golden")
GPUS = tuple(
    Gpu("NVIDIA H200", f"GPU-{i}0000000-0000-0000-0000-00000000000{i}", "Default", "143771 MiB", "Disabled")
    for i in range(4)
)
MACHINE = Machine(
    cores=16,
    flags=frozenset({"avx2"}),
    memory=32 << 30,
    shm=8 << 30,
    descriptors=4096,
    pidfd=True,
    runtime="/run/user/1000",
    runtime_writable=True,
    cache="/cache",
    cache_free=100 << 30,
    torch={"version": "2.13.0", "cuda": "13.0", "gpus": ["H200"] * 4},
    gpus=GPUS,
)
AROUND = Surroundings(
    busy={}, cores=frozenset(range(16)), mps_program="/usr/bin/nvidia-cuda-mps-control", root=False
)


def dry_run(file: Path, gpus: tuple[Gpu, ...] = GPUS) -> str:
    topology = read(file)
    plan = make_plan(topology, gpus, Path(f"/run/user/1000/speclane.launch.{topology.name}"))
    general = doctor.judge(MACHINE)  # which has tests of its own
    findings = [each for each in preflight.judge(plan, MACHINE, AROUND) if each not in general]
    return show(plan) + show_findings(findings)


def test_all_that_are_promised_are_there():
    gpus = {"two-gpu", "one-gpu-mps", "one-gpu-timeslice", "tp2-plus-draft"}
    assert {file.stem for file in SHIPPED} == gpus | {
        "cpu",
        "many-targets-one-speculator",
        "remote-speculator",
    }


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_a_dry_run_shows_what_will_run(file, smollm2, monkeypatch):
    monkeypatch.setenv("SPECLANE_CACHE", str(smollm2.parent))
    shown = dry_run(file)
    golden = GOLDEN / f"{file.stem}.txt"
    if os.environ.get("SPECLANE_WRITE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text()
    assert "error" not in shown.partition("checks\n")[2]
    assert read(file).name == file.stem


def test_one_edit_moves_the_speculator_to_a_gpu(tmp_path, smollm2, monkeypatch):
    monkeypatch.setenv("SPECLANE_CACHE", str(smollm2.parent))
    before = (ROOT / "deploy" / "topologies" / "cpu.toml").read_text()
    head, table, tail = before.partition("[targets.lanes.speculator]\n")
    edited = tmp_path / "cpu.toml"
    edited.write_text(head + table + tail.replace('device = "cpu"', 'device = "gpu:0"', 1))
    plain = dry_run(ROOT / "deploy" / "topologies" / "cpu.toml").splitlines()
    moved = dry_run(edited).splitlines()
    uuid = GPUS[0].uuid
    assert [line for line in moved if line not in plain] == [
        f"  gpu:0: {uuid} (NVIDIA H200)",
        "  run      python -P -m executor serve --host=127.0.0.1 --port=8000 --target=smollm2-135m "
        "--speculator=cascade --shutdown-timeout=30.0 --target-device=cpu --speculator-device=cuda "
        f"--speculator-env=CUDA_VISIBLE_DEVICES={uuid}",
        "  lane     speculator on gpu:0",
        f"    env    CUDA_VISIBLE_DEVICES={uuid}",
        "  main/speculator on gpu:0: weights 66.9MB",
        f"  ok      gpu gpu:0: {uuid} (NVIDIA H200) for main/speculator",
        "  ok      memory: weights of 270MB for 34.4GB on the CPU",
        "  ok      memory: weights of 66.9MB for 151GB on gpu:0",
    ]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_without_gpus_it_is_shown_what_is_missing(file):
    topology = read(file)
    plan = make_plan(topology, (), Path("/run/x"))
    missing = [
        finding.subject
        for finding in preflight.judge(plan, MACHINE, AROUND)
        if finding.level == "error" and "nvidia-smi -L" in finding.advice
    ]
    assert missing == [f"gpu {gpu.name}" for gpu in topology.gpus]
    assert show(plan)
