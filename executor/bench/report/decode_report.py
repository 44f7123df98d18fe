"""What `bench decode` found, as a page: which charts there are, and what they are made from. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executor.bench.report import charts
from executor.bench.report.charts import Bar, Part, Series
from executor.bench.report.page import chart, fold, heading, legend, page, section, table
from executor.bench.report.timeline import ROUNDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from executor.bench.report.timeline import Slice

Row = dict[str, Any]
_MODE_KINDS = {"off": "e", "sequential": "a", "ahead": "b", "outcomes": "c", "auto": "d"}
_ACCEPTANCE_KINDS = {None: "", "coupled": "", "rejection": " dash", "block": " dot"}
_PEER_KINDS = ("other", "other dash", "other dot", "other mix")
_WORK_KINDS = {"verify": "a", "draft": "b", "prepare": "c", "catch up": "d", "commit": "e"}
_LOSSES = {"wire": "b", "coordinator": "c", "bubble": "d", "contention": "e"}
_LOSS_MEANS = (
    "Where the time of a round goes that reads no prompt. wire: to the lanes and back. coordinator: this "
    "process. bubble: the target waits for what the speculator computes. contention: what the target is "
    "slower while the speculator computes. Beside each mode: what a round would take on two devices, "
    "max(K · draft step, verification), over what it took."
)


def decode_report(result: Row, timelines: Mapping[tuple[str, int], Sequence[Slice]]) -> str:
    """`result`: of `bench decode`. `timelines`: what lanes did in the last rounds, by mode and batch."""
    batches = result["batch"] if isinstance(result["batch"], list) else [result["batch"]]
    sections = [_circumstances(result, batches), _speed(result["rows"], batches)]
    if len(batches) > 1:
        sections.append(_concurrency(result["rows"]))
    sections += [
        _by_batch("Acceptance by position", _ACCEPTANCE, batches, lambda batch: _acceptance(result, batch)),
        _by_batch(
            "Measured against the ceiling", _LOSS_MEANS, batches, lambda batch: _ceiling(result, batch)
        ),
        _by_batch(
            "What the lanes did",
            f"The last {ROUNDS} rounds of one run of each mode, by the coordinator's clock.",
            batches,
            lambda batch: _timelines(timelines, batch),
        ),
        _figures(result["rows"]),
    ]
    return page(f"Decoding speed of {_model(result['target'])}", sections)


_ACCEPTANCE = "Of the drafts that reached a position, the share whose token there was accepted."


def _circumstances(result: Row, batches: Sequence[int]) -> str:
    machine = dict(result["machine"])
    shown = {
        "Target": result["target"],
        "Speculator": f"{result['speculator']}, K = {result['k']}",
        "Engine": f"{result['engine']}, {result['dtype']}, device {result['device']}",
        "Lanes": result["lanes"],
        "Threads": f"{result['threads']} a lane at most, of {result['cores']} cores",
        "Sequences at once": ", ".join(map(str, batches)),
        "Prompts": f"{result['prompts']}, of {result['prompt_tokens']} tokens",
        "New tokens": f"{result['new_tokens']} for each prompt",
        "Sampling": f"temperature {result['temperature']:g}, seed {result['seed']}, "
        f"{result['acceptance']} acceptance",
        "Runs": f"{result['repeat']} of each, in turns; medians are shown",
        "Same tokens in every mode": "yes" if result["tokens_agree"] else "no",
        "Processor": machine.pop("cpu"),
        "Versions": ", ".join(f"{name} {version}" for name, version in machine.items()),
    }
    return section("Circumstances", "", table(("what", "value"), [*shown.items()], 2))


def _speed(rows: Sequence[Row], batches: Sequence[int]) -> str:
    """Modes and peers from the first to the last, for each batch."""
    parts = []
    for batch in batches:
        here = [row for row in rows if row["batch"] == batch]
        found = [
            Bar(_name(row), row["tok_s"], row["tok_s_each"], "a" if row["mode"] else "other")
            for row in here
            if row["tok_s"] is not None
        ]
        parts += [heading(_sequences(batch)), chart(charts.bars(f"tok/s, {_sequences(batch)}", found))]
        failed = [(_name(row), row["error"]) for row in here if row["tok_s"] is None]
        if failed:
            parts.append(table(("failed", "its last words"), failed, 2))
    note = "Tokens per second of whole runs, prompts included; a thin line spans the slowest and the fastest."
    return section("Speed by mode", note, *parts)


def _concurrency(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(_name(row) for row in rows))
    kinds = {_name(row): _kind(row) for row in rows if row["mode"]}
    peers = [name for name in names if name not in kinds]
    series = []
    for name in names:
        points = [
            (row["batch"], row["tok_s"]) for row in rows if _name(row) == name and row["tok_s"] is not None
        ]
        kind = kinds.get(name) or _PEER_KINDS[peers.index(name) % len(_PEER_KINDS)]
        if points:
            series.append(Series(name, kind, sorted(points)))
    drawn = charts.lines("tok/s against concurrency", series, "sequences at once", "tok/s")
    note = "Tokens per second of all sequences together. Other engines are grey."
    return section("Speed against concurrency", note, _legend(series), chart(drawn))


def _acceptance(result: Row, batch: int) -> list[str]:
    series = [
        Series(_name(row), _kind(row), list(enumerate(row["acceptance_by_position"], 1)))
        for row in _own(result, batch)
        if row["acceptance_by_position"]
    ]
    if not series:
        return ['<p class="soft">Nothing was drafted.</p>']
    drawn = charts.lines(
        f"acceptance by position, {_sequences(batch)}",
        series,
        "position in the draft",
        "accepted",
        lambda share: f"{share:.0%}",
        top=1.0,
    )
    return [_legend(series), chart(drawn)]


def _ceiling(result: Row, batch: int) -> list[str]:
    rows = []
    for row in _own(result, batch):
        losses = [Part(name, row["loss"][name], kind) for name, kind in _LOSSES.items()]
        rest = max(0.0, 1.0 - sum(part.share for part in losses))
        parts = [Part("target computes", rest, "a"), *losses]
        rows.append((_name(row), parts, _shown(row["ceiling_share"], ".0%")))
    entries = [("target computes", "a"), *_LOSSES.items()]
    return [legend(entries), chart(charts.shares(f"time of a round, {_sequences(batch)}", rows))]


def _timelines(timelines: Mapping[tuple[str, int], Sequence[Slice]], batch: int) -> list[str]:
    parts = [legend(_WORK_KINDS.items())]
    for (name, size), slices in timelines.items():
        if size == batch and slices:
            drawn = charts.timeline(f"lanes in mode {name}, {_sequences(batch)}", slices, _WORK_KINDS)
            parts += [heading(name), chart(drawn, wide=True)]
    return parts


def _figures(rows: Sequence[Row]) -> str:
    columns = ("mode", "at once", "tok/s", "speedup", "length", "ceiling", "hits", "c", "v", *_LOSSES)
    body = []
    for row in rows:
        start = [
            _name(row), str(row["batch"]), _shown(row["tok_s"], ".2f"), _shown(row["speedup"], ".2f")
        ]  # fmt: skip
        if row["mode"] is None:
            body.append([*start, *["-"] * (len(columns) - len(start))])
            continue
        body.append(
            [
                *start,
                f"{row['acceptance_length']:.2f}",
                _shown(row["ceiling_share"], ".0%"),
                _shown(row["hit_rate"], ".0%"),
                _shown(row["c"], ".3f"),
                _shown(row["v"], ".2f"),
                *(f"{row['loss'][name]:.1%}" for name in _LOSSES),
            ]
        )
    note = (
        "length: tokens per target step; hits: verdicts that were guessed; c, v: a draft step and a "
        "verification, in plain steps of the target."
    )
    return section("Figures", note, table(columns, body, 1))


def _by_batch(name: str, note: str, batches: Sequence[int], parts: Callable[[int], list[str]]) -> str:
    """A section with a part for each batch, of which the first is open."""
    if len(batches) == 1:
        return section(name, note, *parts(batches[0]))
    folds = [fold(_sequences(batch), parts(batch), shown=batch == batches[0]) for batch in batches]
    return section(name, note, *folds)


def _own(result: Row, batch: int) -> list[Row]:
    return [row for row in result["rows"] if row["mode"] is not None and row["batch"] == batch]


def _name(row: Row) -> str:
    return str(row["method"] if row["mode"] else f"{row['engine']} {row['method']}")


def _kind(row: Row) -> str:
    """Of a line: its colour is the mode's, its strokes the acceptance's; inline lanes are pale."""
    pale = " pale" if row["lanes"] == "inline" else ""
    return _MODE_KINDS[row["mode"]] + _ACCEPTANCE_KINDS[row["acceptance"]] + pale


def _legend(series: Sequence[Series]) -> str:
    return legend(((one.name, one.kind) for one in series), lines=True)


def _sequences(batch: int) -> str:
    return f"{batch} sequence{'s' if batch > 1 else ''} at once"


def _model(target: str) -> str:
    return target.rstrip("/").rpartition("/")[2]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
