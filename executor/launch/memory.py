"""How much memory the lanes of a process will want, from files' headers alone: nothing is loaded or fetched.

`speclane plan` loads the lanes and measures; this only says whether it is worth trying.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from executor import address, checkpoint, heads, models, safetensors_file, shipped
from executor.errors import InvalidConfig
from ipc import vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from executor.config import Config
    from executor.launch.plan import LaunchPlan, PlannedProcess
    from executor.safetensors_file import Tensor

_DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_WEIGHTLESS = ("ngram", "suffix")
_EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True, slots=True)
class Estimate:
    """Of one lane, in bytes. `kv_tokens`: that it would hold if they fit. `at`: the address of a lane that is
    elsewhere. `unknown`: why nothing is known, or nothing is taken here."""

    process: str
    lane: str
    gpus: tuple[str, ...]
    at: str = ""
    weights: int = 0
    kv_bytes_per_token: int = 0
    kv_tokens: int = 0
    unknown: str = ""

    @property
    def total(self) -> int:
        return self.weights + self.kv_bytes_per_token * self.kv_tokens


def estimates(plan: LaunchPlan) -> list[Estimate]:
    """Of all lanes whose models are known to the launcher."""
    ours = {address: process.name for process in plan.processes for address in process.listens}
    return [each for process in plan.processes for each in _of(process, ours)]


def _of(process: PlannedProcess, ours: Mapping[str, str]) -> list[Estimate]:
    """`ours`: the processes of this launch by the addresses that they listen on."""
    config = process.config
    if config is None:
        return []
    here = [_lane(config, process.name, lane.name, lane.gpus) for lane in process.lanes]
    return here + [_elsewhere(process.name, at, ours.get(at)) for at in process.attaches]


def _elsewhere(process: str, at: str, ours: str | None) -> Estimate:
    """A speculator that a server of this address runs."""
    if ours is not None:
        what = f"counted for {ours}"
    elif address.parse(at, "speculator").local:
        what = "a server of this host that is not of this launch: what it takes is not known here"
    else:
        what = "nothing of this host, but rows that wait for the way there"
    return Estimate(process, "speculator", (), at=at, unknown=what)


def _lane(config: Config, process: str, lane: str, gpus: tuple[str, ...]) -> Estimate:
    model = config.target if lane == "target" else config.speculator
    if config.engine == "toy":
        return Estimate(process, lane, gpus, unknown="a toy holds no model")
    if lane == "speculator" and model in _WEIGHTLESS:
        return Estimate(process, lane, gpus, unknown=f"{model} has no model")
    is_head = lane == "speculator" and (model in ("eagle", "cascade") or model.endswith(heads.SUFFIX))
    read = config.target if is_head else model  # a head reads the target's embedding
    directory = models.found(read, config.cache_dir)
    if directory is None:
        return Estimate(process, lane, gpus, unknown=f"{read} is fetched at the first start")
    try:
        if is_head:
            return Estimate(process, lane, gpus, weights=_head_bytes(config, directory))
        return _estimate(config, process, lane, gpus, directory)
    except (InvalidConfig, OSError, ValueError, KeyError, TypeError) as error:
        return Estimate(process, lane, gpus, unknown=f"{model} cannot be read: {error}")


def _head_bytes(config: Config, target: Path) -> int:
    """Its file, and the target's embedding. Raises OSError, ValueError, InvalidConfig."""
    model = config.speculator
    own = Path(model).expanduser() if model.endswith(heads.SUFFIX) else None
    file = own or shipped.head(vocabulary.read(target).fingerprint)
    if not file:
        raise ValueError(f"no head is shipped for {config.target}")
    stored = sum(tensor.nbytes for tensor in safetensors_file.read(Path(file)))
    embedding = sum(math.prod(tensor.shape) for tensor in _tensors(target) if tensor.name == _EMBEDDING)
    return stored + embedding * _DTYPE_BYTES[config.dtype]


def _tensors(directory: Path) -> Iterator[Tensor]:
    for file in sorted(directory.glob("*.safetensors")):
        yield from safetensors_file.read(file)


def _estimate(config: Config, process: str, lane: str, gpus: tuple[str, ...], directory: Path) -> Estimate:
    width = _DTYPE_BYTES[config.dtype]
    described = checkpoint.read_object(directory / "config.json", lane)
    elements = sum(math.prod(tensor.shape) for tensor in _tensors(directory))
    heads_ = int(described["num_attention_heads"])
    kv_heads = int(described.get("num_key_value_heads") or heads_)
    head_dim = int(described.get("head_dim") or described["hidden_size"] // heads_)
    per_token = 2 * int(described["num_hidden_layers"]) * kv_heads * head_dim * width
    length = config.max_model_len or checkpoint.context(directory, lane)
    tokens = config.max_sequences * length
    if config.kv_tokens is not None:
        tokens = min(tokens, config.kv_tokens)
    return Estimate(
        process, lane, gpus, weights=elements * width, kv_bytes_per_token=per_token, kv_tokens=tokens
    )
