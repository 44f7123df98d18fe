"""Tensors of a checkpoint directory in safetensors files, and the layers that are built from them.

Knows the names and shapes of the Llama family's tensors, which of them are fused, and the types that they are
kept in. How a layer multiplies is handed in; how layers are applied is not its business.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from workers.engines.native.shards import uncut, whole

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from workers.engines.native.config import ModelConfig
    from workers.engines.native.shards import Cut, Shards
    from workers.linear import Linear, MakeLinear


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm over n features: weight · √n in float32, and n times the epsilon (see `model.rms_norm`)."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. `head_norm` has a row of weights for each query and key head."""

    input_norm: Norm
    qkv: Linear
    head_norm: Norm | None
    attention_output: Linear
    post_norm: Norm
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Types:
    """`dtype`: what weights are rounded to; `device`: where they go."""

    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights [out, in] of one or more projections on top of each other, whole, and how ranks share them.

    outputs: of each projection. inputs: of all. Only one of both is cut.
    """

    weight: Tensor
    bias: Tensor | None
    outputs: tuple[Cut, ...]
    inputs: Cut

    @staticmethod
    def of(weight: Tensor, outputs: Cut) -> Matrix:
        """One projection without a bias."""
        return Matrix(weight, None, (outputs,), uncut(weight.shape[1]))

    def keep(self, rank: int) -> Tensor | None:
        """Which outputs are a rank's; None is all."""
        if not any(cut.is_cut for cut in self.outputs):
            return None
        kept, first = [], 0
        for cut in self.outputs:
            own = cut.of(rank)
            kept.append(torch.arange(first + own.start, first + own.stop, device=self.weight.device))
            first += cut.size
        return torch.cat(kept)


class Checkpoint:
    """Tensors by name from model.safetensors, or from the files that model.safetensors.index.json names."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError or ValueError for files that are missing or broken."""
        self._directory = directory
        self._file_of: dict[str, Any] = {}
        self._untaken: set[str] = set()
        for file_name in self._file_names():
            try:
                file = safe_open(str(directory / file_name), framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{directory / file_name} is not a safetensors file: {error}") from None
            names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            self._file_of |= dict.fromkeys(names, file)
        self._untaken = set(self._file_of)
        dtypes = {file.get_slice(name).get_dtype() for name, file in self._file_of.items()}
        self.is_16_bit = dtypes in ({"BF16"}, {"F16"})

    def _file_names(self) -> list[str]:
        index = self._directory / "model.safetensors.index.json"
        if not index.is_file():
            return ["model.safetensors"]
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from None
        for name in names:
            if "/" in name or "\\" in name:
                raise ValueError(f"{index} names {name!r}, which is not a file beside it")
        return names

    def has(self, name: str) -> bool:
        return name in self._file_of

    def take(self, name: str, *shape: int, part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor as stored, or a part of it. Raises ValueError if it is missing or of another shape."""
        if name not in self._file_of:
            raise ValueError(f"{self._directory} has no tensor {name}")
        stored = self._file_of[name].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ValueError(
                f"{self._directory}: {name} has shape {stored.get_shape()}, expected {list(shape)}"
            )
        self._untaken.discard(name)
        tensor: Tensor = stored[part] if part else self._file_of[name].get_tensor(name)
        return tensor

    def check_all_taken(self) -> None:
        """Raises ValueError if the checkpoint holds more than the architecture uses, so is of another one."""
        # Some files carry these although they follow from the configuration.
        left = [name for name in sorted(self._untaken) if not name.endswith("rotary_emb.inv_freq")]
        if left:
            raise ValueError(
                f"{self._directory}: {len(left)} tensors are not of this architecture, such as {left[0]}; "
                f"try the hf engine"
            )


class Weights:
    """The parts of a model, made from a checkpoint one by one so that no two copies of all weights exist."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, types: Types, shards: Shards | None = None
    ) -> None:
        """`shards`: which part of all layers is made; None is all."""
        self._checkpoint = checkpoint
        self._config = config
        self._types = types
        self._shards = shards or whole(config)

    def embedding(self) -> Tensor:
        """[vocabulary, hidden], the features of this rank."""
        config, shards = self._config, self._shards
        name = "model.embed_tokens.weight"
        part = (slice(0, config.vocab_size), shards.hidden.of(shards.rank))
        # A copy: a tensor as it is stored would keep the whole file mapped.
        stored = self._checkpoint.take(name, config.vocab_size, config.hidden_size, part=part)
        return self._stored(stored).clone()

    def head(self) -> Tensor:
        """[vocabulary, hidden], all of it."""
        config = self._config
        if config.tied:
            # A copy of the embedding may be stored under its own name.
            name = "lm_head.weight"
            if self._checkpoint.has(name):
                self._checkpoint.take(name, config.vocab_size, config.hidden_size)
            name = "model.embed_tokens.weight"
        else:
            name = "lm_head.weight"
        return self._stored(self._checkpoint.take(name, config.vocab_size, config.hidden_size))

    def samples(self) -> list[Matrix]:
        """The first layer's matrices, which have the shapes of all others'."""
        return self._matrices(0)

    def layer(self, index: int, make: MakeLinear) -> Layer:
        config = self._config
        prefix = f"model.layers.{index}."
        qkv, output, gate_up, down = (self._made(matrix, make) for matrix in self._matrices(index))
        return Layer(
            input_norm=self._norm(prefix + "input_layernorm.weight", config.hidden_size),
            qkv=qkv,
            head_norm=self._head_norm(prefix + "self_attn.") if config.query_key_norm else None,
            attention_output=output,
            post_norm=self._norm(prefix + "post_attention_layernorm.weight", config.hidden_size),
            gate_up=gate_up,
            down=down,
        )

    def final_norm(self) -> Norm:
        return self._norm("model.norm.weight", self._config.hidden_size)

    def _made(self, matrix: Matrix, make: MakeLinear) -> Linear:
        """The layer of this rank's part of a matrix."""
        rank = self._shards.rank
        weight, bias = matrix.weight, matrix.bias
        if matrix.inputs.is_cut:
            weight = weight[:, matrix.inputs.of(rank)].contiguous()
            bias = bias if rank == 0 else None  # parts are added up, and a bias is to be added once
        return make(weight, bias, matrix.keep(rank))

    def _matrices(self, index: int) -> list[Matrix]:
        config, shards = self._config, self._shards
        hidden, inner = uncut(config.hidden_size), shards.inner
        keys = shards.heads.times(config.head_dim)
        queries = keys.times(config.query_heads // config.kv_heads)
        attended, down = shards.attended, shards.down
        second, third = (queries, inner) if shards.paired else (uncut(queries.size), uncut(inner.size))
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        return [
            self._fused(attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden),
            self._fused(attention, {"o_proj": attended}, second),
            self._fused(mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
            self._fused(mlp, {"down_proj": down}, third),
        ]

    def _fused(self, prefix: str, outputs: dict[str, Cut], inputs: Cut) -> Matrix:
        """Weights on top of each other, and their biases if the checkpoint has any."""
        take = self._checkpoint.take
        weights = [take(f"{prefix}{name}.weight", cut.size, inputs.size) for name, cut in outputs.items()]
        biases = None
        if any(self._checkpoint.has(f"{prefix}{name}.bias") for name in outputs):
            biases = [take(f"{prefix}{name}.bias", cut.size) for name, cut in outputs.items()]
        bias = self._stored(*biases) if biases else None
        return Matrix(self._stored(*weights), bias, tuple(outputs.values()), inputs)

    def _stored(self, *parts: Tensor) -> Tensor:
        """Rounded and on top of each other. Weights in 16 bits stay so, as float32 would only repeat them."""
        types = self._types
        keep = types.dtype == torch.float32 and types.device.type == "cpu" and self._checkpoint.is_16_bit
        rounded = [part if keep else part.to(types.dtype) for part in parts]
        return (torch.cat(rounded) if len(rounded) > 1 else rounded[0]).to(types.device)

    def _head_norm(self, prefix: str) -> Norm:
        config = self._shards.config(self._config)
        queries = self._norm(prefix + "q_norm.weight", config.head_dim)
        keys = self._norm(prefix + "k_norm.weight", config.head_dim)
        rows = [queries.weight.expand(config.query_heads, -1), keys.weight.expand(config.kv_heads, -1)]
        return Norm(torch.cat(rows), queries.epsilon)

    def _norm(self, name: str, features: int) -> Norm:
        weight = self._checkpoint.take(name, features).to(self._types.dtype).float()
        return Norm((weight * features**0.5).to(self._types.device), features * self._config.norm_eps)
