"""Charts of a report, as SVG: bars, lines, shares of a whole, and the timeline of lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from executor.bench.report import svg
from executor.bench.report.timeline import Slice, span

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDTH = 640
_LEFT = 150
"""Room for names."""
_RIGHT = 70
"""Room for values."""
_ROW = 30
_LANES = "coordinator", "target", "speculator"


class Bar(NamedTuple):
    """`each`: what single runs came to, shown from the least to the most. `kind`: class of its colour."""

    name: str
    value: float
    each: Sequence[float]
    kind: str


class Series(NamedTuple):
    """Points by x. `kind`: class of its colour."""

    name: str
    kind: str
    points: Sequence[tuple[float, float]]


class Part(NamedTuple):
    """A share of a whole, from 0 to 1."""

    name: str
    share: float
    kind: str


def bars(label: str, rows: Sequence[Bar]) -> str:
    """One under the other, from zero."""
    scale = svg.ticks(max(max(row.value, *row.each, 0.0) for row in rows))
    room = WIDTH - _LEFT - _RIGHT
    height = len(rows) * _ROW

    def across(value: float) -> float:
        return _LEFT + room * value / scale[-1]

    parts = [svg.line(across(tick), 0, across(tick), height, "grid") for tick in scale]
    parts += [svg.text(across(tick), height + 16, svg.number(tick), "middle", "soft") for tick in scale]
    for i, row in enumerate(rows):
        y = i * _ROW
        seen = ", ".join(svg.number(value) for value in row.each)
        parts.append(svg.text(_LEFT - 8, y + 19, row.name, "end"))
        parts.append(
            svg.rect(_LEFT, y + 6, across(row.value) - _LEFT, 18, f"fill {row.kind}", f"{row.name}: {seen}")
        )
        if len(row.each) > 1:
            parts.append(svg.line(across(min(row.each)), y + 15, across(max(row.each)), y + 15, "range"))
        end = max(row.value, *row.each)
        parts.append(svg.text(across(end) + 6, y + 19, f"{row.value:.1f}"))
    return svg.drawing(WIDTH, height + 22, label, parts)


def lines(
    label: str,
    series: Sequence[Series],
    x_name: str,
    y_name: str,
    shown: Callable[[float], str] = svg.number,
    top: float | None = None,
) -> str:
    """Values over x, at evenly spaced places: each x that occurs has one. `top`: of the scale, if known."""
    places = sorted({x for one in series for x, _ in one.points})
    scale = svg.ticks(top if top is not None else max(y for one in series for _, y in one.points))
    left, upper, lower, right = 56.0, 22.0, 230.0, WIDTH - 24.0
    step = (right - left - 40) / max(1, len(places) - 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + 20 + step * places.index(x), lower - (lower - upper) * y / scale[-1]

    parts = [svg.text(0, 12, y_name, kind="soft")]
    for tick in scale:
        y = lower - (lower - upper) * tick / scale[-1]
        parts.append(svg.line(left, y, right, y, "grid"))
        parts.append(svg.text(left - 8, y + 4, shown(tick), "end", "soft"))
    parts += [svg.text(at(x, 0)[0], lower + 18, svg.number(x), "middle", "soft") for x in places]
    parts.append(svg.text(right, lower + 36, x_name, "end", "soft"))
    for one in series:
        parts.append(svg.path([at(x, y) for x, y in one.points], f"line {one.kind}"))
    for one in series:
        for x, y in one.points:
            said = f"{one.name}, {x_name} {svg.number(x)}: {shown(y)}"
            parts.append(svg.dot(*at(x, y), f"fill {one.kind}", said))
    return svg.drawing(WIDTH, lower + 44, label, parts)


def shares(label: str, rows: Sequence[tuple[str, Sequence[Part], str]]) -> str:
    """Of each row (name, parts, what is said at its end) parts side by side, on a ground of the whole."""
    room = WIDTH - _LEFT - _RIGHT
    parts: list[str] = []
    for i, (name, pieces, end) in enumerate(rows):
        y, x = i * _ROW, float(_LEFT)
        parts.append(svg.text(_LEFT - 8, y + 19, name, "end"))
        parts.append(svg.rect(_LEFT, y + 6, room, 18, "ground"))
        for piece in pieces:
            width = room * piece.share
            if width >= 0.5:
                # Less by the gap that keeps neighbours apart.
                said = f"{name}, {piece.name}: {piece.share:.1%}"
                parts.append(svg.rect(x, y + 6, max(0.5, width - 1), 18, f"fill {piece.kind}", said))
            x += width
        parts.append(svg.text(WIDTH - _RIGHT + 6, y + 19, end))
    return svg.drawing(WIDTH, len(rows) * _ROW + 2, label, parts)


def timeline(label: str, slices: Sequence[Slice], kinds: dict[str, str]) -> str:
    """A row for each lane that did anything. `kinds`: classes by the names of slices."""
    left, right, row = 84.0, WIDTH * 1.5 - 16, 34
    scale = svg.ticks(span(slices), 8)
    lanes = [lane for lane in _LANES if any(each.lane == lane for each in slices)]
    height = len(lanes) * row

    def across(ms: float) -> float:
        return left + (right - left) * ms / scale[-1]

    parts = [svg.line(across(tick), 0, across(tick), height, "grid") for tick in scale]
    parts += [svg.text(across(tick), height + 16, svg.number(tick), "middle", "soft") for tick in scale]
    parts.append(svg.text(0, height + 16, "ms", kind="soft"))
    parts += [svg.text(left - 8, i * row + 21, lane, "end") for i, lane in enumerate(lanes)]
    for each in slices:
        width = max(0.7, across(each.length) - left)
        said = f"{each.name}: {each.length:.3f} ms from {each.began:.3f} ms; {each.what}"
        y = lanes.index(each.lane) * row + 6
        kind = f"fill {kinds.get(each.name, 'other')}"
        parts.append(svg.rect(across(each.began), y, width, 22, kind, said))
    return svg.drawing(WIDTH * 1.5, height + 22, label, parts)
