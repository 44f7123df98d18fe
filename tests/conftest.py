"""What all tests share: the default checkpoint, and a check that nothing which lives outside Python leaks."""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from leaks import assert_nothing_leaks

from executor import models
from executor.prune import prune

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHECKED = ("process", "faults", "launcher")


def pytest_collection_finish() -> None:
    """What was imported and collected lives to the end: to look through it takes 0.4 s after each test."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct checkpoint from the user's own cache, fetched by the first test that asks."""
    return models.resolve("smollm2-135m")


@pytest.fixture(scope="session")
def thin(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six of its thirty layers: the same tokens and shapes in a third of the time, but it talks nonsense."""
    return prune(smollm2, tmp_path_factory.mktemp("thin") / "thin", [0, 1, 2, 3, 4, 29])


@pytest.fixture(scope="session", params=["thin", pytest.param("smollm2", marks=pytest.mark.slow)])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """For what six layers show as well as thirty; all of them where time is no matter."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def pruned(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model of all but one of the checkpoint's own layers: often right, and often wrong."""
    layers = json.loads((checkpoint / "config.json").read_text())["num_hidden_layers"]
    kept = [layer for layer in range(layers) if layer != layers * 2 // 3]
    return prune(checkpoint, tmp_path_factory.mktemp("draft") / "pruned", kept)


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
