"""Prompts of a benchmark: JSON lines with `question_id`, `category` and `turns`, as Spec-Bench has them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

COPY_HEAVY = Path(__file__).with_name("copy_heavy.jsonl")
"""Few prompts whose answers repeat much of them, for which prompt lookup is good."""
LANE_BENCH = Path(__file__).with_name("lane_bench.jsonl")
"""Twenty prompts in each of eight categories, written for this benchmark."""
SHIPPED = {"copy-heavy": COPY_HEAVY, "lane-bench": LANE_BENCH}
"""Files that are known by name."""

_EXAMPLE = '{"question_id": 1, "category": "edit", "turns": ["Repeat this: …"]}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """Only the first of a question's turns is used."""

    question_id: str
    category: str
    text: str


def read_prompts(path: Path, limit: int | None = None, each: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a file, or the first `each` of every category.

    Raises InvalidConfig naming "prompts" and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidConfig(
            "prompts", f"prompts file {path} cannot be read: {reason}; leave it out for the shipped prompts"
        ) from error
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise InvalidConfig("prompts", f"prompts file {path} has no prompts; a line that works: {_EXAMPLE}")
    if each is not None:
        seen: Counter[str] = Counter()
        prompts = [prompt for prompt in prompts if _counted(seen, prompt.category) <= each]
    return prompts[:limit]


def mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of each category, then the second of each, and so on."""
    seen: Counter[str] = Counter()
    places = [(_counted(seen, prompt.category), prompt) for prompt in prompts]
    return [prompt for _, prompt in sorted(places, key=lambda place: place[0])]


def _counted(seen: Counter[str], category: str) -> int:
    seen[category] += 1
    return seen[category]


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        record = json.loads(line)
        turns = record["turns"]
        text = turns[0]
    except (ValueError, LookupError, TypeError):
        text = None
    if not isinstance(text, str) or not text or not isinstance(turns, list):
        raise InvalidConfig(
            "prompts", f"prompts file {path}, line {number}: not a question; a line that works: {_EXAMPLE}"
        )
    return Prompt(str(record.get("question_id", number)), str(record.get("category", "")), text)
