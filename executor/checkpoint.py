"""What a checkpoint directory must hold before a worker is asked to load it.

It owns the checks that need no weights, and how its JSON files are read. It must not know where checkpoints
come from.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

NATIVE_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""What the native engine has code for; its workers refuse all else, too."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len")


def check_directory(path: Path, field: str) -> Path:
    """`path`, if it holds a causal language model, or a drafting head for one, with whole safetensors.

    Raises InvalidConfig for `field` otherwise, in one line.
    """
    if not path.is_dir():
        raise InvalidConfig(field, f"{field} {path} is a file; pass the directory that holds its config.json")
    config = path / "config.json"
    if not config.is_file():
        raise InvalidConfig(
            field, f"{field} {path} has no config.json, so it is no checkpoint; try smollm2-135m"
        )
    settings = read_object(config, field)
    if names_a_head(settings):
        _check_weights(path, field)
        return path
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


def names_a_head(settings: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's config is that of an EAGLE-3 head, which is no model of its own."""
    names = [*(settings.get("architectures") or ()), settings.get("speculators_model_type")]
    return any("eagle3" in str(name).lower() for name in names)


def check_native(path: Path, field: str) -> None:
    """Raises InvalidConfig for `field` if the native engine has no code for this checkpoint."""
    name = read_object(path / "config.json", field)["architectures"][0]
    if name not in NATIVE_ARCHITECTURES:
        raise InvalidConfig(
            field,
            f"{field} {path} is a {name}, but the native engine runs only {', '.join(NATIVE_ARCHITECTURES)}; "
            f"try --engine hf",
        )


def check_ranks(path: Path, ranks: int) -> None:
    """Raises InvalidConfig if the model has too few heads of keys and values for so many ranks to share."""
    if ranks == 1:
        return
    settings = read_object(path / "config.json", "target")
    heads = settings.get("num_key_value_heads") or settings.get("num_attention_heads")
    if not isinstance(heads, int) or ranks > heads:
        raise InvalidConfig(
            "target_ranks",
            f"target-ranks {ranks} cannot share the {heads} heads of keys and values of {path}; "
            f"try {heads if isinstance(heads, int) else 1}",
        )


def context(path: Path, field: str) -> int:
    """The model's own context in tokens: max_position_embeddings, or what older families call it.

    Raises InvalidConfig for `field` if there is none.
    """
    file = path / "config.json"
    settings = read_object(file, field)
    name = next((name for name in _CONTEXT_NAMES if settings.get(name) is not None), _CONTEXT_NAMES[0])
    tokens = settings.get(name)
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 2:
        raise InvalidConfig(field, f"{field}: {file} has {name} {tokens!r}; it must be above 1, like 2048")
    return tokens


def shape(path: Path) -> tuple[int, int]:
    """Layers, and the size of a hidden row. Raises InvalidConfig for `target` if the config has none."""
    settings = read_object(path / "config.json", "target")
    layers, hidden = settings.get("num_hidden_layers"), settings.get("hidden_size")
    if not isinstance(layers, int) or not isinstance(hidden, int):
        raise InvalidConfig("target", f"target: {path / 'config.json'} has no num_hidden_layers, hidden_size")
    return layers, hidden


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
    shards = read_object(index, field).get("weight_map")
    if not isinstance(shards, dict):
        raise InvalidConfig(field, f"{field}: {index} has no weight_map; fetch the checkpoint again")
    missing = sorted({str(name) for name in shards.values() if not (path / str(name)).is_file()})
    if missing:
        raise InvalidConfig(
            field, f"{field} {path} lacks {missing[0]} of its index; fetch the checkpoint again"
        )


def read_object(path: Path, field: str) -> dict[str, Any]:
    """The object in a JSON file of a checkpoint. Raises InvalidConfig for `field` if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            field, f"{field}: cannot read {path}: {error}; fetch the checkpoint again"
        ) from error
    if not isinstance(content, dict):
        raise InvalidConfig(field, f"{field}: {path} holds no JSON object; fetch the checkpoint again")
    return content
