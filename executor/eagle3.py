"""Drafting heads in the public EAGLE-3 layout (arXiv 2503.01840): config.json and one file of safetensors.

What config and header say is checked here; the tensors are the worker's. Two spellings are known: a flat
config with tensors `midlayer.…`, and one whose decoder layer's fields stand in `transformer_layer_config`,
with tensors `layers.0.…`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executor import safetensors_file
from executor.checkpoint import names_a_head, read_object
from executor.errors import InvalidConfig
from executor.hidden_rows import ORDER_BYTES
from ipc.messages import HeadSpec

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ipc.messages import LaneSpec

FILE = "model.safetensors"
_BYTES = 2
_WINDOW = 256
"""Of the latest positions, at most: a head attends over no more, and no more rows are kept for it."""
_UNKNOWN = {
    "fc_norm": False,
    "norm_output": False,
    "norm_before_fc": False,
    "attention_bias": False,
    "mlp_bias": False,
    "use_aux_hidden_state": True,
    "hidden_act": "silu",
    "num_hidden_layers": 1,
}
"""Fields that would change the arithmetic, and the value that they must have."""


def is_head(directory: Path, field: str) -> bool:
    """Raises InvalidConfig for `field` if there is no readable config."""
    return names_a_head(read_object(directory / "config.json", field))


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """A head's settings with those of its decoder layer, and of its features, beside the others."""
    inner = settings.get("transformer_layer_config"), settings.get("eagle_config")
    found = dict(settings)
    for part in inner:
        if isinstance(part, dict):
            found = part | {name: value for name, value in found.items() if value is not None}
    return found


def head_spec(directory: Path, target: LaneSpec, target_config: Mapping[str, Any], field: str) -> HeadSpec:
    """The head in a directory, for this target. Raises InvalidConfig about `field`."""
    if target.engine != "native":
        raise InvalidConfig(
            field,
            f"{field} {directory} reads hidden rows of the target, but engine {target.engine} shows none; "
            "use --engine native, or try suffix",
        )
    settings = flat(read_object(directory / "config.json", field))
    for name, supported in _UNKNOWN.items():
        if settings.get(name, supported) not in (supported, None):
            raise InvalidConfig(
                field,
                f"{field} {directory} has {name} {settings[name]!r}, of which only {supported!r} is known; "
                "try a head without it, or suffix",
            )
    sizes = settings.get("target_vocab_size") or settings.get("vocab_size"), target_config.get("vocab_size")
    if sizes[0] != sizes[1]:
        raise InvalidConfig(
            field,
            f"{field} {directory} is a head for {sizes[0]} tokens, but target {target.model} has {sizes[1]}; "
            "try a head that was made for it, or suffix",
        )
    hidden, layers = int(target_config["hidden_size"]), int(target_config["num_hidden_layers"])
    features = _features(directory, field)
    taps = _taps(settings, layers, directory, field)
    if features != len(taps) * hidden:
        raise InvalidConfig(
            field,
            f"{field} {directory} reads rows of {features}, but {len(taps)} layers of target {target.model} "
            f"make {len(taps) * hidden}; try a head that was made for it, or suffix",
        )
    row_bytes = _BYTES * features
    window = max(1, min(_WINDOW, ORDER_BYTES // row_bytes - 2 * target.num_speculative_tokens - 2))
    return HeadSpec(str(directory / FILE), taps, row_bytes, window)


def _features(directory: Path, field: str) -> int:
    """How wide the rows are that its first layer takes."""
    try:
        shapes = {tensor.name: tensor.shape for tensor in safetensors_file.read(directory / FILE)}
    except (OSError, ValueError) as error:
        raise InvalidConfig(
            field,
            f"{field} {directory} has no readable {FILE}: {error}; heads are read from one file of "
            "safetensors only, so convert it, or try suffix",
        ) from error
    shape = shapes.get("fc.weight") or shapes.get("model.fc.weight")
    if shape is None or len(shape) != 2:
        raise InvalidConfig(
            field, f"{field} {directory / FILE} has no fc.weight, so it is no head; try suffix"
        )
    return shape[1]


def _taps(settings: Mapping[str, Any], layers: int, directory: Path, field: str) -> tuple[int, ...]:
    """After how many layers of the target the parts of a row are taken."""
    given = settings.get("eagle_aux_hidden_state_layer_ids")
    if not given:
        return (2, layers // 2, layers - 3)
    taps = tuple(given) if isinstance(given, list) else ()
    if not taps or any(not isinstance(tap, int) or not 0 < tap <= layers for tap in taps):
        raise InvalidConfig(
            field,
            f"{field} {directory} reads rows after layers {given}, but the target has {layers} layers; "
            "try a head that was made for it, or suffix",
        )
    return taps
