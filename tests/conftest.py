"""What all tests share: the default checkpoint, and a check that nothing which lives outside Python leaks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from leaks import assert_nothing_leaks

from executor import models

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHECKED = ("process", "faults", "launcher")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct checkpoint from the user's own cache, fetched by the first test that asks."""
    return models.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def runtime_directory() -> Iterator[Path]:
    """Where executors make their socket directories: a short path, apart from other programs' entries."""
    with tempfile.TemporaryDirectory(prefix="lanes-") as name:
        yield Path(name)


@pytest.fixture
def directory(runtime_directory: Path) -> Iterator[Path]:
    """For sockets: its path is short."""
    path = runtime_directory / "d"
    path.mkdir()
    yield path
    for entry in path.iterdir():
        entry.unlink()
    path.rmdir()


@pytest.fixture(autouse=True)
def no_leak(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests with real processes must leave as many processes, threads and descriptors as they found."""
    if Path(str(request.node.path)).parent.name not in _CHECKED:
        yield
        return
    directory = request.getfixturevalue("runtime_directory")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    with assert_nothing_leaks(directory):
        yield
