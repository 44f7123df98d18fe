"""What `bench decode` found, as tables on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def show(result: dict[str, Any]) -> None:
    """A table for each number of sequences at once, and one by category for each if there are several."""
    for batch in result["batch"] if isinstance(result["batch"], list) else [result["batch"]]:
        _show_batch(result, batch, [row for row in result["rows"] if row["batch"] == batch])


def _show_batch(result: dict[str, Any], batch: int, rows: list[dict[str, Any]]) -> None:
    title = f"{result['target']}, {result['dtype']}, {result['threads']} threads, batch {batch}"
    title += f", {result['acceptance']} acceptance"
    title += "" if result["lanes"] == "process" else f", lanes {result['lanes']}"
    columns = ("mode", "tok/s", "speedup", "length", "by position", "draft", "verify", "wire", "tokens")
    caption = "length: tokens per target step; draft, verify, wire: milliseconds per round"
    table = Table(*columns, title=escape(title), caption=caption, box=None)
    for row in rows:
        table.add_row(*(_peer(row) if row["mode"] is None else _own(row)))
    Console().print(table)
    _show_categories([row for row in rows if row["mode"] is not None])


def _own(row: dict[str, Any]) -> list[str]:
    split = row["round_ms"]
    return [
        row["method"],
        *_speed(row),
        f"{row['acceptance_length']:.2f}",
        " ".join(f"{share:.0%}" for share in row["acceptance_by_position"]) or "-",
        *(f"{split[part]:.2f}" for part in ("draft", "verify")),
        f"{split['wire'] + split['coordinator']:.2f}",
        row["tokens_sha256"][:8],
    ]


def _peer(row: dict[str, Any]) -> list[str]:
    name = escape(f"{row['engine']} {row['method']}")
    if row["tok_s"] is None:
        return [name, "failed"]
    return [name, *_speed(row)]


def _speed(row: dict[str, Any]) -> list[str]:
    return [f"{row['tok_s']:.2f}", "-" if row["speedup"] is None else f"{row['speedup']:.2f}"]


def _show_categories(rows: list[dict[str, Any]]) -> None:
    table = Table("category", "mode", "tok/s", "speedup", "length", "by position", box=None)
    categories = rows[0]["categories"] if rows else {}
    for category in categories if len(categories) > 1 else ():
        for row in rows:
            part = row["categories"][category]
            table.add_row(
                escape(category) or "-",
                row["method"],
                *_speed(part),
                f"{part['acceptance_length']:.2f}",
                " ".join(f"{share:.0%}" for share in part["acceptance_by_position"]) or "-",
            )
    if table.row_count:
        Console().print(table)
