"""Which head belongs to which target, told by the files' headers alone."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from executor import shipped
from executor.errors import InvalidConfig
from executor.heads import head_spec
from ipc.messages import HeadSpec, LaneSpec, Vocabulary

TARGET = LaneSpec("target", "native", "./target", "bf16", "cpu", 1, 4, 64)
HEADER = {"taps": "3,6", "window": "32", "hidden_size": "8", "vocabulary": "abc"}


def write(file, **changes: str | None) -> str:
    header = {name: value for name, value in (HEADER | changes).items() if value is not None}
    save_file({"x": np.zeros(1, dtype=np.float32)}, file, header)
    return str(file)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "DIRECTORY", tmp_path)
    (tmp_path / "model").mkdir()
    return tmp_path


@pytest.mark.parametrize("name", ["eagle", "cascade"])
def test_the_shipped_head_is_found_by_vocabulary(files, name):
    file = write(files / "model" / "head.safetensors")
    found = head_spec(name, TARGET, Vocabulary(100, "abc"), "speculator")
    assert found == HeadSpec(file, (3, 6, 0), row_bytes=2 * 3 * 8, window=32)


def test_a_file_of_the_users_own_is_taken(files):
    file = write(files / "mine.safetensors", window="16")
    assert head_spec(file, TARGET, Vocabulary(100, "abc"), "speculator").window == 16


@pytest.mark.parametrize(
    ("speculator", "changes", "says"),
    [
        ("cascade", {"vocabulary": "other"}, "no head is shipped for target ./target"),
        ("mine.safetensors", {"vocabulary": "other"}, "is a head for another vocabulary"),
        ("mine.safetensors", {"taps": "three"}, "is no drafting head"),
        ("mine.safetensors", {"window": None}, "is no drafting head"),
        ("none.safetensors", {}, "is no drafting head"),
    ],
)
def test_others_are_refused_in_one_line_with_what_works(files, monkeypatch, speculator, changes, says):
    monkeypatch.chdir(files)
    write(files / "model" / "head.safetensors", **changes)
    write(files / "mine.safetensors", **changes)
    with pytest.raises(InvalidConfig, match=says) as refusal:
        head_spec(speculator, TARGET, Vocabulary(100, "abc"), "speculator")
    assert refusal.value.field == "speculator"
    assert str(refusal.value).endswith("or try suffix")
    assert "\n" not in str(refusal.value)


def test_what_is_shipped_is_whole():
    """The files in the repository itself."""
    directory = shipped.Path(shipped.__file__).parent / "shipped_files"
    for file in directory.glob("*/head.safetensors"):
        header = shipped.metadata(file)
        assert set(HEADER) <= set(header)
        assert file.stat().st_size <= 25 << 20
    for file in directory.glob("*/prior.safetensors"):
        assert len(shipped.metadata(file)["vocabulary"]) == 64
        assert file.stat().st_size <= 4 << 20
    assert list(directory.glob("*/head.safetensors"))
