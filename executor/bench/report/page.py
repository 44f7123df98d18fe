"""The page itself: style, headings and tables around charts. Colours are named here and nowhere else."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from executor.bench.report import svg

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LIGHT = """
--page: #fcfcfb; --ink: #1a1a19; --soft: #62615d; --rule: #e3e2de; --ground: #efeeea;
--a: #2a78d6; --b: #008e5b; --c: #c27a00; --d: #4a3aa7; --e: #d8433f; --grey: #8a8984;"""
_DARK = """
--page: #1a1a19; --ink: #f2f1ed; --soft: #aaa9a3; --rule: #3a3936; --ground: #2b2a28;
--a: #4a94ec; --b: #2bb685; --c: #dd9a1f; --d: #9d94f0; --e: #ee7370; --grey: #8f8e88;"""
_RULES = """
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif }
h1 { font-size: 1.5rem; line-height: 1.2 }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .3rem }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
p { margin: .3rem 0 .6rem }
p.soft, th { color: var(--soft) }
details > summary { cursor: pointer; margin: .8rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
th, td { padding: .25rem .8rem .25rem 0; text-align: left; border-bottom: 1px solid var(--rule) }
th { font-weight: 500 }
td { vertical-align: top }
td.n, th.n { text-align: right; white-space: nowrap }
ul.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; list-style: none; margin: .3rem 0;
  padding: 0; font-size: .85rem }
.legend svg { display: inline-block; width: 1.6rem; min-width: 0; height: .7rem; margin-right: .35rem }
.scroll { overflow-x: auto }
.scroll svg { display: block; width: 100%; min-width: 30rem; font: 13px system-ui, sans-serif }
.wide svg { min-width: 60rem }
svg text { fill: var(--ink) }
svg text.soft { fill: var(--soft) }
.grid { stroke: var(--rule) }
.ground { fill: var(--ground) }
.range { stroke: var(--ink); stroke-width: 2 }
.line { fill: none; stroke: currentColor; stroke-width: 2 }
.fill { fill: currentColor }
.a { color: var(--a) }
.b { color: var(--b) }
.c { color: var(--c) }
.d { color: var(--d) }
.e { color: var(--e) }
.other { color: var(--grey) }
.dash { stroke-dasharray: 6 4 }
.dot { stroke-dasharray: 2 4 }
.mix { stroke-dasharray: 8 3 2 3 }
.pale { opacity: .55 }"""


def page(title: str, sections: Iterable[str]) -> str:
    """A whole document. `title` is text, sections are HTML."""
    style = f":root {{ color-scheme: light dark;{_LIGHT} }}\n"
    style += f"@media (prefers-color-scheme: dark) {{ :root {{{_DARK} }} }}{_RULES}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n</body>\n</html>\n"
    )


def section(heading: str, note: str, *parts: str) -> str:
    """`heading` and `note` are text, parts are HTML."""
    said = f'<p class="soft">{escape(note)}</p>' if note else ""
    return f"<section>\n<h2>{escape(heading)}</h2>\n{said}\n" + "\n".join(parts) + "\n</section>"


def chart(drawing: str, *, wide: bool = False) -> str:
    """A drawing that scrolls where the screen is narrower than it can be read on."""
    return f'<div class="scroll{" wide" if wide else ""}">{drawing}</div>'


def legend(entries: Iterable[tuple[str, str]], *, lines: bool = False) -> str:
    """Names and the classes of their colours. `lines`: whether that is what they have in the chart."""
    items = "".join(f"<li>{_sample(kind, lines)}{escape(name)}</li>" for name, kind in entries)
    return f'<ul class="legend">{items}</ul>'


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def fold(summary: str, parts: Iterable[str], *, shown: bool) -> str:
    """Parts that can be folded away."""
    return (
        f"<details{' open' if shown else ''}><summary>{escape(summary)}</summary>{''.join(parts)}</details>"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers_from: int) -> str:
    """Cells are text; columns from `numbers_from` on are set to the right."""

    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=n' if i >= numbers_from else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    head = f"<thead><tr>{cells('th', columns)}</tr></thead>"
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _sample(kind: str, as_line: bool) -> str:
    drawn = svg.line(0, 7, 32, 7, f"line {kind}") if as_line else svg.rect(18, 0, 14, 14, f"fill {kind}")
    return f'<svg viewBox="0 0 32 14" aria-hidden="true">{drawn}</svg>'
