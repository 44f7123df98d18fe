"""What tests of the wire share: a hub over real sockets, and that it leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from leaks import assert_nothing_leaks

from ipc.channel import Hub

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def leaves_nothing(runtime_directory: Path) -> Iterator[None]:
    with assert_nothing_leaks(runtime_directory):
        yield


@pytest.fixture
def hub(directory: Path) -> Iterator[Hub]:
    hub = Hub(directory)
    yield hub
    hub.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Where bits are compared: by how many threads share a product, it is summed in another order. And small
    ones gain nothing from threads, and lose much where other work shares the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
