"""Lessons on disk, one safetensors file per batch. A shard follows from seed and number alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from teacher import Lessons

if TYPE_CHECKING:
    from pathlib import Path

    import torch


def path(directory: Path, number: int) -> Path:
    return directory / f"{number:05d}.safetensors"


def save(file: Path, lessons: Lessons) -> None:
    """Written whole or not at all."""
    part = file.with_suffix(".part")
    save_file({name: tensor.contiguous() for name, tensor in lessons._asdict().items()}, part)
    os.replace(part, file)


def load(file: Path) -> Lessons:
    return Lessons(**load_file(file))


def present(directory: Path) -> list[Path]:
    return sorted(directory.glob("[0-9]*.safetensors"))


def rows(lessons: Lessons, index: torch.Tensor) -> Lessons:
    """Only the rows of `index`."""
    return Lessons(*(tensor[index] for tensor in lessons))
