"""What the doctor says of machines that are fit, and of those that are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor import doctor
from executor.doctor import Gpu, Machine, judge

GPU = Gpu("H200", "GPU-1", "Default", "143771 MiB", "Disabled")
FIT = Machine(
    cores=8,
    flags=frozenset({"avx2"}),
    memory=32 << 30,
    shm=8 << 30,
    descriptors=4096,
    pidfd=True,
    runtime="/run/user/1000",
    runtime_writable=True,
    cache="/cache",
    cache_free=100 << 30,
    torch={"version": "2.13.0", "cuda": None, "gpus": []},
)
WITH_GPUS = replace(
    FIT, gpus=(GPU, GPU), torch={"version": "2.13.0", "cuda": "13.0", "gpus": ["H200", "H200"]}
)


@pytest.mark.parametrize("machine", [FIT, WITH_GPUS, replace(WITH_GPUS, gpus=(GPU,), mps="/tmp/nvidia-mps")])
def test_a_fit_machine_needs_no_advice(machine):
    assert [finding for finding in judge(machine) if finding.level != "ok" or finding.advice] == []


@pytest.mark.parametrize(
    ("machine", "subject", "level", "advice"),
    [
        (replace(FIT, cores=1), "cores", "warning", "give it two"),
        (replace(FIT, flags=frozenset()), "cpu", "warning", "another machine"),
        (replace(FIT, memory=1 << 20), "memory", "warning", "about 1 GB"),
        (replace(FIT, shm=1 << 20), "/dev/shm", "warning", "--shm-size"),
        (replace(FIT, descriptors=256), "open files", "warning", "ulimit -n 4096"),
        (replace(FIT, pidfd=False), "pidfd", "error", "Linux 5.3"),
        (replace(FIT, runtime_writable=False), "sockets", "error", "XDG_RUNTIME_DIR"),
        (replace(FIT, runtime="/" + "x" * 80), "sockets", "error", "XDG_RUNTIME_DIR"),
        (replace(FIT, cache_free=0), "cache", "warning", "--cache-dir"),
        (replace(FIT, torch={"error": "torch cannot be imported"}), "torch", "error", "pip install"),
        (replace(FIT, gpus=(GPU,)), "torch and GPUs", "error", "build for your driver"),
        (
            replace(WITH_GPUS, torch=WITH_GPUS.torch | {"gpus": ["H200"]}, visible_devices="0"),
            *("torch and GPUs", "warning", "CUDA_VISIBLE_DEVICES=0"),
        ),
        (
            replace(WITH_GPUS, gpus=(GPU._replace(compute_mode="Exclusive_Process"), GPU)),
            *("gpu 0 mode", "error", "nvidia-cuda-mps-control -d"),
        ),
        (replace(WITH_GPUS, gpus=(GPU,)), "mps", "warning", "--group one_for_all"),
        (replace(FIT, memfd="no memfd"), "shared memory", "warning", "Linux 5.1"),
        (replace(WITH_GPUS, cuda_bindings=False), "cuda ipc", "warning", "pip install 'speclane[cuda]'"),
        (replace(WITH_GPUS, wsl=True), "cuda ipc", "warning", "host memory"),
        (
            replace(WITH_GPUS, gpus=(GPU._replace(mig="Enabled"), GPU)),
            *("cuda ipc", "warning", "host memory"),
        ),
    ],
)
def test_what_is_wrong_comes_with_what_to_change(machine, subject, level, advice):
    (finding,) = [
        finding for finding in judge(machine) if finding.level != "ok" and finding.subject == subject
    ]
    assert finding.level == level
    assert advice in finding.advice


def test_memory_is_shared_here_for_real():
    assert doctor._try_memfd() == ""
    assert doctor._has("msgspec")
    assert not doctor._has("msgspec_.nothing")
