"""Cores and threads of lanes on a CPU, where nothing is said of them."""

from __future__ import annotations

import os

import pytest

from executor import Config
from executor.layout import Layout, layout


@pytest.mark.parametrize(
    ("cores", "speculator", "mode", "apart", "expected"),
    [
        (2, "cascade", "sequential", False, ((0, 1), (0, 1))),
        (2, "cascade", "ahead", False, ((0,), (1,))),
        (2, "cascade", "auto", False, ((0, 1), (0, 1))),
        (2, "cascade", "auto", True, ((0,), (1,))),
        (8, "cascade", "auto", False, ((0, 1, 2, 3, 4, 5), (6, 7))),
        (16, "cascade", "auto", False, (tuple(range(12)), (12, 13, 14, 15))),
        (16, "suffix", "auto", False, (tuple(range(16)), (15,))),
        (16, "off", "sequential", False, (tuple(range(16)), (15,))),
        (4, "ngram", "sequential", True, ((0, 1, 2), (3,))),
        (8, "cascade", "sequential", True, ((0, 1, 2, 3, 4, 5), (6, 7))),
        (1, "cascade", "auto", True, ((0,), (0,))),
    ],
)
def test_lanes_that_have_to_work_at_once_share_no_core(cores, speculator, mode, apart, expected):
    assert layout(range(cores), speculator, mode, apart=apart) == expected


def test_it_is_said_in_words():
    assert str(Layout((0, 1), (3,))) == "target 2 threads for cores 0,1; speculator 1 thread for cores 3"


def test_configured(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    config = Config(speculator="cascade", mode="ahead")
    assert [config.threads_of(lane) for lane in ("target", "speculator")] == [3, 1]
    assert config.placements["target"].cores is None
    pinned = Config(speculator="cascade", pin=True)
    assert pinned.placements["target"].cores == {0, 1, 2}
    assert pinned.placements["speculator"].cores == {3}
    mixed = Config(speculator="cascade", pin=True, target_cores="0", threads=2)
    assert mixed.placements["target"].cores == {0}
    assert [mixed.threads_of(lane) for lane in ("target", "speculator")] == [2, 2]
