"""What can still be had: the host's word, and that of a control group with a limit."""

from __future__ import annotations

import pytest

from ipc import host_memory


@pytest.fixture
def told(tmp_path, monkeypatch):
    """`told(host=…, **files)`: what the kernel says."""
    monkeypatch.setattr(host_memory, "_HOST", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_GROUP", tmp_path)

    def tell(**files: str) -> int:
        for name, text in files.items():
            (tmp_path / name.replace("_", ".")).write_text(text)
        return host_memory.available()

    return tell


HOST = "MemTotal:       100 kB\nMemAvailable:        40 kB\nHugePages_Total:       0\n"


def test_the_host_says_it(told):
    assert told(meminfo=HOST) == 40 << 10
    assert told(memory_max="max\n", memory_current="7\n", memory_stat="anon 5\ninactive_file 2\n") == 40 << 10


def test_a_group_has_less_but_for_files_that_can_be_dropped(told):
    stat = "anon 2000\ninactive_file 3000\n"
    assert told(meminfo=HOST, memory_max="10000", memory_current="9000", memory_stat=stat) == 4000
    assert told(memory_current="20000") == 0
    assert told(memory_max=str(1 << 40)) == 40 << 10


def test_who_says_nothing_has_some(told):
    assert told() == 1 << 30
    assert told(meminfo="nonsense") == 1 << 30


def test_this_host_tells():
    assert host_memory.available() > 0
