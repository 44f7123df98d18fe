"""`speclane prune`: a draft model out of a model's own layers."""

from typing import Annotated

import typer

from executor.cli import options
from executor.cli.output import note, progress_shown
from executor.errors import InvalidConfig


def prune(
    source: Annotated[str, typer.Argument(help="Alias, checkpoint directory or hub id.", metavar="SOURCE")],
    destination: Annotated[str, typer.Argument(help="Directory to make.", metavar="DESTINATION")],
    layers: Annotated[str, typer.Option(help="Layers to keep, from 0, such as 0-3,26-29.", metavar="LAYERS")],
    cache_dir: options.CacheDir = None,
) -> None:
    """Make a draft model of some layers of a model, for --speculator DESTINATION."""
    from executor import models
    from executor.config import local_path
    from executor.prune import prune as prune_checkpoint

    kept = parse_layers(layers)
    made = local_path("destination", destination, "./draft")
    cache = None if cache_dir is None else local_path("cache_dir", cache_dir, "./models")
    with progress_shown():
        directory = models.resolve(source, field="source", cache_dir=cache, progress=note)
    try:
        written = prune_checkpoint(directory, made, kept)
    except OSError as error:
        raise InvalidConfig(
            "destination", f"DESTINATION {destination} cannot be written: {error.strerror}; try ./draft"
        ) from error
    note(f"{len(kept)} layers of {source} written to {written}")


def parse_layers(text: str) -> list[int]:
    """`0-3,26` is [0, 1, 2, 3, 26]. Raises InvalidConfig."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise InvalidConfig("layers", f"layers must be numbers and ranges, got {text!r}; try 0-3,26-29")
        if dash and int(last) < int(first):
            raise InvalidConfig("layers", f"layers {part.strip()} runs backwards; try {last}-{first}")
        if len(first) > 6 or len(last) > 6:
            raise InvalidConfig(
                "layers", f"layers must be numbers below a million, got {text!r}; try 0-3,26-29"
            )
        numbers += range(int(first), int(last if dash else first) + 1)
    return numbers
