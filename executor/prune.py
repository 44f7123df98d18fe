"""A draft checkpoint made of some layers of another one; tensors are copied as bytes.

It owns which names and settings depend on a layer's number. It must not know how a model computes.
"""

from __future__ import annotations

import json
import re
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from executor import safetensors_file
from executor.checkpoint import check_directory, read_object
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LAYER = re.compile(r"((?:.*?\.)?(?:layers|h)\.)(\d+)(\..*)")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def prune(source: Path, destination: Path, layers: Sequence[int]) -> Path:
    """Write a checkpoint with only these layers of `source`, numbered anew, to `destination`; returns it.

    layers: numbers from 0, ascending. Tokenizer and generation files are copied as they are. Raises
    InvalidConfig naming "source", "destination" or "layers"; OSError. Either all is written or nothing.
    """
    check_directory(source, "source")
    if destination.exists():
        raise InvalidConfig(
            "destination", f"destination {destination} exists; name a directory that does not"
        )
    config = read_object(source / "config.json", "source")
    _check_layers(config, layers)
    try:
        stored = [
            tensor for file in sorted(source.glob("*.safetensors")) for tensor in safetensors_file.read(file)
        ]
    except ValueError as error:
        raise InvalidConfig("source", f"source: {error}; fetch the checkpoint again") from error
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for file in source.iterdir():
            if file.is_file() and not file.name.endswith(_WEIGHTS):
                shutil.copyfile(file, partial / file.name)
        text = json.dumps(_pruned_config(config, layers), indent=2, ensure_ascii=False)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
        safetensors_file.write(partial / "model.safetensors", _pruned_tensors(stored, layers))
        partial.rename(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return destination


def _check_layers(config: dict[str, Any], layers: Sequence[int]) -> None:
    count = config.get("num_hidden_layers")
    if not isinstance(count, int):
        raise InvalidConfig(
            "source", "source: config.json has no num_hidden_layers, so its layers are not known"
        )
    if not layers:
        raise InvalidConfig("layers", f"layers is empty; name at least one of 0 … {count - 1}, for example 0")
    for layer in layers:
        if not 0 <= layer < count:
            raise InvalidConfig("layers", f"layer {layer} does not exist; the source has 0 … {count - 1}")
    if any(left >= right for left, right in pairwise(layers)):
        raise InvalidConfig(
            "layers", f"layers must ascend, got {list(layers)}; try {','.join(map(str, sorted(set(layers))))}"
        )


def _pruned_config(config: dict[str, Any], layers: Sequence[int]) -> dict[str, Any]:
    count = config["num_hidden_layers"]
    pruned = {
        key: [value[i] for i in layers]
        if "layer" in key and isinstance(value, list) and len(value) == count
        else value
        for key, value in config.items()
    }
    if isinstance(
        config.get("max_window_layers"), int
    ):  # so many layers from the first have no sliding window
        pruned["max_window_layers"] = sum(layer < config["max_window_layers"] for layer in layers)
    return pruned | {"num_hidden_layers": len(layers)}


def _pruned_tensors(
    stored: list[safetensors_file.Tensor], layers: Sequence[int]
) -> list[safetensors_file.Tensor]:
    numbers = {layer: i for i, layer in enumerate(layers)}
    kept = []
    for tensor in stored:
        match = _LAYER.fullmatch(tensor.name)
        if match is None:
            kept.append(tensor)
        elif int(match[2]) in numbers:
            kept.append(tensor._replace(name=f"{match[1]}{numbers[int(match[2])]}{match[3]}"))
    # Readers map the data as arrays: wide elements first keeps every tensor aligned.
    return sorted(kept, key=lambda tensor: _element_bytes(tensor), reverse=True)


def _element_bytes(tensor: safetensors_file.Tensor) -> int:
    elements = 1
    for length in tensor.shape:
        elements *= length
    return tensor.nbytes // max(elements, 1)
