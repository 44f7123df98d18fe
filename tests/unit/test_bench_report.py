"""The report of a benchmark: its pieces, and that a page is whole and needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from executor.bench.report import charts, svg
from executor.bench.report.decode_report import decode_report
from executor.bench.report.timeline import Slice, last_rounds, span
from executor.trace import Trace


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0, [0, 1]),
        (1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7, [0, 2, 4, 6, 8]),
        (10, [0, 2, 4, 6, 8, 10]),
        (11, [0, 2.5, 5, 7.5, 10, 12.5]),
        (1100, [0, 250, 500, 750, 1000, 1250]),
        (0.03, [0, 0.01, 0.02, 0.03]),
        (26, [0, 10, 20, 30]),
    ],
)
def test_ticks_are_round_and_reach_the_top(top: float, expected: list[float]) -> None:
    assert svg.ticks(top) == pytest.approx(expected)


def test_text_is_escaped() -> None:
    assert svg.text(1, 2.5, "<&") == '<text x="1" y="2.5" text-anchor="start" class="">&lt;&amp;</text>'
    assert "a&lt;b" in svg.rect(0, 0, 1, 1, "x", "a<b")
    assert [svg.number(value) for value in (0, 1.5, 2.999, 100, -0.25)] == ["0", "1.5", "3", "100", "-0.25"]


def test_bars_are_as_long_as_their_values() -> None:
    drawn = charts.bars("speed", [charts.Bar("x", 50, [40, 60], "a"), charts.Bar("y", 100, [100], "b")])
    widths = [float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert widths == [210.0, 420.0]
    assert drawn.count('class="range"') == 1


def test_shares_of_a_row_fill_it_from_the_left() -> None:
    parts = [charts.Part("p", 0.25, "a"), charts.Part("none", 0.0, "b"), charts.Part("q", 0.5, "c")]
    drawn = charts.shares("time", [("mode", parts, "70%")])
    rects = re.findall(r'<rect x="([\d.]+)" y="6" width="([\d.]+)" height="18" class="([^"]*)"', drawn)
    assert rects == [("150", "420", "ground"), ("150", "104", "fill a"), ("255", "209", "fill c")]


def test_lines_place_each_x_once_and_evenly() -> None:
    series = [charts.Series("s", "a", [(1, 0.0), (8, 1.0)]), charts.Series("t", "b", [(2, 0.5)])]
    drawn = charts.lines("l", series, "batch", "tok/s", top=1.0)
    assert re.findall(r'points="([^"]*)"', drawn) == ["76,230 596,22", "336,126"]


def traced(rounds: int) -> list[dict[str, Any]]:
    """Rounds of 10 ms: a draft of 2, a verification of 6, a commit of 1."""
    trace = Trace(None)
    zero = trace._zero
    for i in range(rounds):
        at = zero + i / 100
        trace.work("speculator", "draft", at, at + 0.002, 0.002, k=5)
        trace.work("target", "verify", at + 0.002, at + 0.008, 0.006, sequences=1)
        trace.own("commit", at + 0.008, at + 0.009)
        trace.flow(i, (("speculator", at + 0.002), ("target", at + 0.008)))
        trace.count("setting", at, {"K": 5})
    trace.write()  # has no file, so does nothing
    return trace.events


def test_the_last_rounds_of_a_trace() -> None:
    slices = last_rounds(traced(7), rounds=2)
    assert [(each.lane, each.name) for each in slices] == [
        ("coordinator", "commit"),
        *[("speculator", "draft"), ("target", "verify"), ("coordinator", "commit")] * 2,
    ]
    assert slices[0].began == 0
    assert [each.began for each in slices[1:4]] == pytest.approx([2, 4, 10])
    assert [each.length for each in slices[1:4]] == pytest.approx([2, 6, 1])
    assert (slices[1].what, slices[2].what) == ("k 5", "sequences 1")
    assert span(slices) == pytest.approx(21)


def test_fewer_rounds_than_asked_for_are_shown_whole() -> None:
    assert len(last_rounds(traced(3), rounds=20)) == 9
    assert last_rounds(traced(0)) == []
    assert last_rounds([]) == []


def test_a_trace_in_memory_keeps_its_last_events() -> None:
    trace = Trace(None, kept=2)
    for i in range(3):
        trace.own(str(i), 0.0, 1.0)
    assert [event["name"] for event in trace.events] == ["1", "2"]


class Page(HTMLParser):
    """Fails where a tag is closed that was not open; remembers what could be fetched from elsewhere."""

    VOID = frozenset({"meta"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.headings: list[str] = []
        self.labels: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.fetched += [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        self.labels += [value for name, value in attrs if name == "aria-label"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data) -> None:
        if self.open and self.open[-1] == "h2":
            self.headings.append(data)


def row(mode: str, batch: int, speed: float, acceptance: str | None = None) -> dict[str, Any]:
    return {
        "mode": mode,
        "acceptance": acceptance,
        "lanes": "process",
        "engine": "speclane",
        "method": f"{mode} {acceptance}" if acceptance == "block" else mode,
        "batch": batch,
        "tok_s": speed,
        "tok_s_each": [speed, speed + 1],
        "speedup": 1.5,
        "acceptance_length": 2.0,
        "acceptance_by_position": [] if mode == "off" else [0.8, 0.5],
        "ceiling_share": 0.75,
        "hit_rate": None,
        "c": None if mode == "off" else 0.1,
        "v": 1.2,
        "loss": {"wire": 0.1, "coordinator": 0.05, "bubble": 0.2, "contention": 0.0},
    }


def result(batches: list[int]) -> dict[str, Any]:
    peers = {"mode": None, "engine": "vllm-cpu", "batch": batches[-1], "threads": 2, "speedup": 0.5}
    rows = []
    for batch in batches:
        rows += [row("off", batch, 10.0 * batch), row("ahead", batch, 12.0 * batch, "coupled")]
        rows.append(row("ahead", batch, 14.0 * batch, "block"))
    rows.append(peers | {"method": "none", "tok_s": 5.0, "tok_s_each": [5.0], "tokens": 4})
    rows.append(peers | {"method": "ngram", "tok_s": None, "speedup": None, "error": "<no> room"})
    return {
        "rows": rows,
        "tokens_agree": True,
        "target": "/models/<big>",
        "speculator": "ngram",
        "k": 5,
        "acceptance": "coupled",
        "engine": "native",
        "dtype": "bf16",
        "device": "cpu",
        "lanes": "process",
        "threads": 2,
        "cores": 2,
        "batch": batches if len(batches) > 1 else batches[0],
        "prompts": 4,
        "prompt_tokens": 99,
        "new_tokens": 16,
        "temperature": 0.0,
        "seed": 0,
        "repeat": 2,
        "machine": {"cpu": "Some CPU", "python": "3.12", "torch": "2.13.0"},
    }


@pytest.mark.parametrize("batches", [[1], [1, 4]])
def test_a_page_is_whole_and_needs_nothing_else(batches: list[int]) -> None:
    slices = [Slice("target", "verify", 0.0, 5.0, "sequences 1")]
    text = decode_report(result(batches), {("ahead", batch): slices for batch in batches})
    page = Page(text)
    assert (page.open, page.fetched) == ([], [])
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text
    concurrency = ["Speed against concurrency"] if len(batches) > 1 else []
    assert page.headings == [
        "Circumstances",
        "Speed by mode",
        *concurrency,
        "Acceptance by position",
        "Measured against the ceiling",
        "What the lanes did",
        "Figures",
    ]
    kinds = ("tok/s, ", "acceptance by position, ", "time of a round, ", "lanes in mode ahead, ")
    for kind in kinds:
        assert sum(label.startswith(kind) for label in page.labels) == len(batches)
    assert page.labels.count("tok/s against concurrency") == len(concurrency)
    for said in (
        "Some CPU",
        "torch 2.13.0",
        "&lt;no&gt; room",
        "/models/&lt;big&gt;",
        "vllm-cpu none",
        "ahead block",
        "75%",
    ):
        assert said in text


def test_all_colours_are_defined() -> None:
    """A class without a colour would be drawn in black, which no one sees in the dark."""
    slices = [Slice("target", name, 0.0, 5.0, "") for name in ("verify", "draft", "prepare", "x")]
    text = decode_report(result([1, 4]), {("ahead", 1): slices})
    drawn = {name for names in re.findall(r'class="((?:fill|line) [^"]*)"', text) for name in names.split()}
    assert drawn >= {"fill", "line", "a", "b", "c", "other", "dot"}
    assert {name for name in drawn if f"\n.{name} {{" not in text} == set()


def test_lines_of_inline_lanes_look_otherwise() -> None:
    found = result([1, 4])
    found["lanes"] = "process,inline"
    inline = [each | {"lanes": "inline"} for each in found["rows"] if each["mode"]]
    found["rows"] += [each | {"method": f"{each['method']} inline"} for each in inline]
    text = decode_report(found, {})
    looks = set(re.findall(r'<polyline [^>]*class="([^"]*)"', text))
    assert {"line b pale", "line b dot pale", "line b", "line b dot"} <= looks
    assert "process,inline" in text


def test_what_was_never_drafted_is_said() -> None:
    found = result([1])
    found["rows"] = [row("off", 1, 10.0)]
    assert "Nothing was drafted." in decode_report(found, {})
