"""What NVML says of an ended process, through a fake driver."""

from __future__ import annotations

from types import SimpleNamespace

import pynvml
import pytest

from executor import gpu_memory

PID = 4711


@pytest.fixture
def driver(monkeypatch):
    """`driver(compute, mps)`: per device, the process ids that hold memory; counts how often it is in use."""
    fake = SimpleNamespace(in_use=0)

    def install(compute, mps) -> SimpleNamespace:
        def clients(pids):
            return lambda device: [SimpleNamespace(pid=pid) for pid in pids[device]]

        def use(change):
            fake.in_use += change

        monkeypatch.setattr(pynvml, "nvmlInit", lambda: use(1))
        monkeypatch.setattr(pynvml, "nvmlShutdown", lambda: use(-1))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: len(compute))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda i: i)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", clients(compute))
        monkeypatch.setattr(pynvml, "nvmlDeviceGetMPSComputeRunningProcesses", clients(mps))
        return fake

    return install


@pytest.mark.parametrize(
    ("compute", "mps", "held"),
    [
        ([[], []], [[], []], False),
        ([[1], [2]], [[], []], False),
        ([[1], [2, PID]], [[], []], True),
        ([[1], [2]], [[PID], []], True),
        ([], [], False),
    ],
)
def test_held_by(driver, compute, mps, held):
    fake = driver(compute, mps)
    assert gpu_memory.held_by(PID) is held
    assert fake.in_use == 0


def test_without_a_driver(monkeypatch):
    def missing():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", missing)
    assert gpu_memory.held_by(PID) is False


def test_a_driver_that_does_not_say(driver, monkeypatch):
    def refuse(device):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    fake = driver([[PID]], [[]])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", refuse)
    assert gpu_memory.held_by(PID) is False
    assert fake.in_use == 0
