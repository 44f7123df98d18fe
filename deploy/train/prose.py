"""Prose that is at hand on any machine with Python: docstrings and descriptions of installed packages.

Passages keep the name of the distribution that they come from, so that a model card can name its sources.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SHORTEST, _LONGEST = 200, 1200
"""Characters of a passage."""
_SHARE = 1 << 20
"""Characters that one source gives at most, so that none sets the tone."""
_MAX_FILE_BYTES = 1 << 18
_LETTERS = re.compile(r"[a-z ,.']")
_PERMISSIVE = re.compile(r"MIT|BSD|Apache|PSF|Python Software Foundation|ISC|Unlicense|CC0|Zope", re.I)


def passages() -> tuple[list[str], list[str]]:
    """Passages in a fixed order without repeats, and their sources as `name version (licence)`."""
    found: dict[str, None] = {}
    sources = []
    for source, texts in _sources():
        room = _SHARE
        for passage in (passage for text in texts for passage in _cut(text)):
            if passage not in found:
                found[passage] = None
                room -= len(passage)
            if room <= 0:
                break
        if room < _SHARE:
            sources.append(source)
    return list(found), sources


def _sources() -> Iterator[tuple[str, Iterator[str]]]:
    version = sysconfig.get_python_version()
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = (file for file in stdlib.rglob("*.py") if not {"site-packages", "test"} & set(file.parts))
    yield f"Python {version} standard library (PSF)", _docstrings(files)
    seen = set()
    for package in sorted(importlib.metadata.distributions(), key=lambda package: package.name.lower()):
        licence = _licence(package)
        if package.name.lower() in seen or not licence:
            continue
        seen.add(package.name.lower())
        files = (Path(str(file.locate())) for file in package.files or () if file.suffix == ".py")
        yield f"{package.name} {package.version} ({licence})", _package_texts(package, files)


def _package_texts(package: importlib.metadata.Distribution, files: Iterable[Path]) -> Iterator[str]:
    yield str(package.metadata.get_payload() or "")
    yield from _docstrings(files)


def _licence(package: importlib.metadata.Distribution) -> str:
    """The permissive licence that a package declares; empty if it declares none."""
    metadata = package.metadata
    declared = [metadata.get("License-Expression"), metadata.get("License")]
    declared += metadata.get_all("Classifier") or []
    for text in declared:
        if text and (match := _PERMISSIVE.search(text)):
            return match.group()
    return ""


def _docstrings(files: Iterable[Path]) -> Iterator[str]:
    for file in sorted(files):
        try:
            if file.stat().st_size > _MAX_FILE_BYTES:
                continue
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def _cut(text: str) -> Iterator[str]:
    """Runs of whole paragraphs that are mostly letters."""
    run = ""
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip()
        if len(paragraph) > _LONGEST or len(_LETTERS.findall(paragraph)) < 0.85 * len(paragraph):
            paragraph = ""
        if paragraph and len(run) + len(paragraph) <= _LONGEST:
            run = f"{run}\n\n{paragraph}" if run else paragraph
            continue
        if len(run) >= _SHORTEST:
            yield run
        run = paragraph
    if len(run) >= _SHORTEST:
        yield run
