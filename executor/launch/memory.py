"""How much memory the lanes of a process will want, from files' headers alone: nothing is loaded or fetched.

`speclane plan` loads the lanes and measures; this only says whether it is worth trying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from executor import checkpoint, heads, models, safetensors_file
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

    from executor.config import Config
    from executor.launch.plan import LaunchPlan, PlannedProcess

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_WEIGHTLESS = ("ngram", "suffix", "cascade", "eagle")


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one lane, in bytes. `kv_tokens`: that it would hold if they fit. `unknown`: why nothing is known."""

    process: str
    lane: str
    gpus: tuple[str, ...]
    weights: int = 0
    kv_bytes_per_token: int = 0
    kv_tokens: int = 0
    unknown: str = ""

    @property
    def total(self) -> int:
        return self.weights + self.kv_bytes_per_token * self.kv_tokens


def estimates(plan: LaunchPlan) -> list[Estimate]:
    """Of all lanes whose models are known to the launcher."""
    return [each for process in plan.processes for each in _of(process)]


def _of(process: PlannedProcess) -> list[Estimate]:
    config = process.config
    if config is None:
        return []
    made = []
    for lane in process.lanes:
        made.append(_lane(config, process.name, lane.name, lane.gpus))
    return made


def _lane(config: Config, process: str, lane: str, gpus: tuple[str, ...]) -> Estimate:
    model = config.target if lane == "target" else config.speculator
    if config.engine == "toy":
        return Estimate(process, lane, gpus, unknown="a toy holds no model")
    if lane == "speculator" and (model in _WEIGHTLESS or model.endswith(heads.SUFFIX)):
        return Estimate(process, lane, gpus, unknown=f"{model} has no model of its own")
    directory = models.found(model, config.cache_dir)
    if directory is None:
        return Estimate(process, lane, gpus, unknown=f"{model} is fetched at the first start")
    try:
        return _estimate(config, process, lane, gpus, directory)
    except (InvalidConfig, OSError, ValueError, KeyError, TypeError) as error:
        return Estimate(process, lane, gpus, unknown=f"{model} cannot be read: {error}")


def _estimate(config: Config, process: str, lane: str, gpus: tuple[str, ...], directory: Path) -> Estimate:
    width = _DTYPE_BYTES[config.dtype]
    described = checkpoint.read_object(directory / "config.json", lane)
    elements = sum(
        math.prod(tensor.shape)
        for file in sorted(directory.glob("*.safetensors"))
        for tensor in safetensors_file.read(file)
    )
    heads_ = int(described["num_attention_heads"])
    kv_heads = int(described.get("num_key_value_heads") or heads_)
    head_dim = int(described.get("head_dim") or described["hidden_size"] // heads_)
    per_token = 2 * int(described["num_hidden_layers"]) * kv_heads * head_dim * width
    length = config.max_model_len or checkpoint.context(directory, lane)
    tokens = config.max_sequences * length
    if config.kv_tokens is not None:
        tokens = min(tokens, config.kv_tokens)
    return Estimate(process, lane, gpus, elements * width, per_token, tokens)
