"""Cores and threads of lanes on a CPU, where nothing is said of them."""

from __future__ import annotations

import os

import pytest

from executor import Config
from executor.layout import Layout, contend, layout
from ipc.messages import LaneSpec


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


@pytest.mark.parametrize(
    ("target", "speculator", "cores", "shared"),
    [
        (("native", 2), ("cascade", 2), 2, True),
        (("native", 1), ("cascade", 1), 2, False),
        (("native", 1), ("cascade", 1), 1, True),
        (("hf", 3), ("native", 2), 4, True),
        (("native", 2), ("ngram", 2), 2, False),
        (("toy", 2), ("toy", 2), 2, False),
        (("native", 2), ("remote", 2), 2, False),
    ],
)
def test_lanes_contend_if_both_compute_on_the_same_cores(target, speculator, cores, shared):
    specs = [
        LaneSpec(lane, engine, "", "fp32", "cpu", threads, 1, 64)
        for lane, (engine, threads) in (("target", target), ("speculator", speculator))
    ]
    assert contend(specs, cores) == shared
    assert not contend(specs[:1], 1)
