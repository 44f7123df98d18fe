"""What the GPU tests share: the devices that there are. They run as they are on one GPU and on two."""

from __future__ import annotations

import pytest
import torch

from ipc import cuda
from ipc.errors import CudaIpcUnavailable


def _identity(ordinal: int) -> str:
    return str(torch.cuda.get_device_properties(ordinal).uuid)


@pytest.fixture(scope="session")
def devices() -> list[str]:
    """The GPUs by UUID; the lanes of a test are on the first and the last of them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    found = [_identity(ordinal) for ordinal in range(torch.cuda.device_count())]
    try:
        cuda.check_possible(found[0])
    except CudaIpcUnavailable as error:
        pytest.skip(f"no CUDA IPC here: {error}")
    return found


@pytest.fixture(params=["one GPU", "two GPUs"])
def pair(request: pytest.FixtureRequest, devices: list[str]) -> tuple[str, str]:
    """The exporter's device and the importer's, by UUID."""
    if request.param == "one GPU":
        return devices[0], devices[0]
    if len(devices) < 2:
        pytest.skip("needs two CUDA devices")
    return devices[0], devices[1]
