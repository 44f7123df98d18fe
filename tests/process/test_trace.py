"""`--trace FILE`: what lanes did when, in the form that trace viewers read."""

from __future__ import annotations

import json

import pytest

from executor import LLM, InvalidConfig, SamplingParams


def test_a_row_for_each_lane_and_arrows_between_them(tmp_path):
    file = tmp_path / "trace.json"
    toys = {"engine": "toy", "speculator": "vocabulary=256,agree=0.8,near=0.8", "threads": 1}
    with LLM(mode="outcomes", trace=file, **toys) as llm:
        llm.generate(["one", "two"], SamplingParams(temperature=0.9, seed=1, max_tokens=30, ignore_eos=True))
        rounds = llm.coordinator.stats.rounds
    events = json.loads(file.read_text())["traceEvents"]
    rows = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert rows == {0: "coordinator", 1: "target", 2: "speculator"}
    slices = [(rows[event["pid"]], event["name"]) for event in events if event["ph"] == "X"]
    assert set(slices) == {
        ("target", "verify"),
        ("speculator", "draft"),
        ("speculator", "prepare"),
        ("coordinator", "commit"),
    }
    assert slices.count(("target", "verify")) == slices.count(("coordinator", "commit")) == rounds
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
    arrows = [event for event in events if event["ph"] in "stf"]
    ways: dict[int, list[tuple[str, str]]] = {}
    for event in arrows:
        ways.setdefault(event["id"], []).append((event["ph"], rows[event["pid"]]))
    assert all(way == [("s", "speculator"), ("t", "target"), ("f", "coordinator")] for way in ways.values())
    assert len(ways) >= rounds
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"shares", "setting"}


def test_a_file_that_cannot_be_written_is_refused_before_anything_starts(tmp_path):
    llm = LLM(engine="toy", trace=tmp_path / "nowhere" / "trace.json")
    with pytest.raises(InvalidConfig, match=r"^--trace .*: No such file or directory; try trace.json$"):
        llm.start()
