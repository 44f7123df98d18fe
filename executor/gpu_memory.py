"""Whether the driver still counts GPU memory for a process that has ended, by NVML."""

from __future__ import annotations

import pynvml


def held_by(pid: int) -> bool:
    """False too where nothing can be known: no driver, or a driver that numbers processes otherwise, as in a
    container with its own process ids."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    try:
        devices = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return any(pid == client.pid for device in devices for client in _clients(device))
    except pynvml.NVMLError:
        return False
    finally:
        pynvml.nvmlShutdown()


def _clients(device: object) -> list[pynvml.c_nvmlProcessInfo_t]:
    return [
        *pynvml.nvmlDeviceGetComputeRunningProcesses(device),
        *pynvml.nvmlDeviceGetMPSComputeRunningProcesses(device),
    ]
