"""Pieces of SVG as text. Knows nothing of what is drawn; colours are classes, which the page defines."""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def drawing(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """As wide as there is room, in units of which `width` fit; `label`: for those who do not see it."""
    size = f'viewBox="0 0 {number(width)} {number(height)}"'
    return f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'


def rect(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    place = f'x="{number(x)}" y="{number(y)}" width="{number(max(0.0, width))}" height="{number(height)}"'
    return f'<rect {place} class="{kind}">{_title(title)}</rect>'


def text(x: float, y: float, content: str, anchor: str = "start", kind: str = "") -> str:
    place = f'x="{number(x)}" y="{number(y)}" text-anchor="{anchor}"'
    return f'<text {place} class="{kind}">{escape(content)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{number(x1)}" y1="{number(y1)}" x2="{number(x2)}" y2="{number(y2)}"'
    return f'<line {ends} class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """Straight from point to point."""
    joined = " ".join(f"{number(x)},{number(y)}" for x, y in points)
    return f'<polyline points="{joined}" class="{kind}"/>'


def dot(x: float, y: float, kind: str, title: str = "") -> str:
    return f'<circle cx="{number(x)}" cy="{number(y)}" r="4" class="{kind}">{_title(title)}</circle>'


def ticks(top: float, most: int = 5) -> list[float]:
    """Round numbers from 0 on, the last of them `top` or the first above it; at most `most` after 0."""
    if top <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(top / most))
    # 10 · power is enough for any top: it is more than top / most.
    step = next(step * power for step in (1, 2, 2.5, 5, 10) if step * power * most >= top * (1 - 1e-9))
    return [i * step for i in range(math.ceil(top / step - 1e-9) + 1)]


def number(value: float) -> str:
    """Short: two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _title(content: str) -> str:
    return f"<title>{escape(content)}</title>" if content else ""
