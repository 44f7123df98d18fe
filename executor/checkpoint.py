"""What a checkpoint directory must hold before a worker is asked to load it.

It owns the checks that need no weights. It must not know where checkpoints come from.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

_CAUSAL = ("ForCausalLM", "LMHeadModel")


def check_directory(path: Path, field: str) -> Path:
    """`path`, if it holds a causal language model with whole safetensors.

    Raises InvalidConfig for `field` otherwise, in one line.
    """
    if not path.is_dir():
        raise InvalidConfig(field, f"{field} {path} is a file; pass the directory that holds its config.json")
    config = path / "config.json"
    if not config.is_file():
        raise InvalidConfig(
            field, f"{field} {path} has no config.json, so it is no checkpoint; try smollm2-135m"
        )
    settings = _object(config, field)
    architectures, size = settings.get("architectures"), settings.get("vocab_size")
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(first, str) or not first.endswith(_CAUSAL):
        raise InvalidConfig(
            field,
            f"{field} {path} has architectures {architectures!r}, none known as a causal language model; "
            f"one such is LlamaForCausalLM, as of smollm2-135m",
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidConfig(
            field, f"{field}: {config} has vocab_size {size!r}; it must be above 0, like 49152"
        )
    _check_weights(path, field)
    return path


def _check_weights(path: Path, field: str) -> None:
    if not any(path.glob("*.safetensors")):
        patterns = ("*.bin", "*.pt", "*.pth", "*.gguf")
        others = sorted(file.name for pattern in patterns for file in path.glob(pattern))
        found = f"only {others[0]}" if others else "no weights at all"
        raise InvalidConfig(
            field,
            f"{field} {path} has no *.safetensors ({found}); weights are read from safetensors only, "
            f"so save the model with save_pretrained(), or try smollm2-135m",
        )
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return
    shards = _object(index, field).get("weight_map")
    if not isinstance(shards, dict):
        raise InvalidConfig(field, f"{field}: {index} has no weight_map; fetch the checkpoint again")
    missing = sorted({str(name) for name in shards.values() if not (path / str(name)).is_file()})
    if missing:
        raise InvalidConfig(
            field, f"{field} {path} lacks {missing[0]} of its index; fetch the checkpoint again"
        )


def _object(path: Path, field: str) -> dict[str, Any]:
    """The object in a JSON file; what else it holds is the checkpoint's fault."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            field, f"{field}: cannot read {path}: {error}; fetch the checkpoint again"
        ) from error
    if not isinstance(content, dict):
        raise InvalidConfig(field, f"{field}: {path} holds no JSON object; fetch the checkpoint again")
    return content
