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

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from workers.engines.native.config import ModelConfig
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

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor as stored. Raises ValueError if it is missing or of another shape."""
        if name not in self._file_of:
            raise ValueError(f"{self._directory} has no tensor {name}")
        tensor: Tensor = self._file_of[name].get_tensor(name)
        if tensor.shape != shape:
            raise ValueError(
                f"{self._directory}: {name} has shape {list(tensor.shape)}, expected {list(shape)}"
            )
        self._untaken.discard(name)
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

    def __init__(self, checkpoint: Checkpoint, config: ModelConfig, types: Types) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._types = types

    def embedding(self) -> Tensor:
        """[vocabulary, hidden]"""
        config = self._config
        name = "model.embed_tokens.weight"
        # A copy: a tensor as it is stored would keep the whole file mapped.
        return self._stored(self._checkpoint.take(name, config.vocab_size, config.hidden_size)).clone()

    def head(self) -> Tensor:
        """[vocabulary, hidden]"""
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

    def samples(self) -> list[Tensor]:
        """The first layer's weights, which have the shapes of all others."""
        return [weight for weight, _ in self._matrices(0)]

    def layer(self, index: int, make: MakeLinear) -> Layer:
        config = self._config
        prefix = f"model.layers.{index}."
        qkv, output, gate_up, down = (make(weight, bias) for weight, bias in self._matrices(index))
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

    def _matrices(self, index: int) -> list[tuple[Tensor, Tensor | None]]:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        return [
            self._fused(attention, {"q_proj": queries, "k_proj": keys, "v_proj": keys}, hidden),
            self._fused(attention, {"o_proj": hidden}, queries),
            self._fused(mlp, {"gate_proj": inner, "up_proj": inner}, hidden),
            self._fused(mlp, {"down_proj": hidden}, inner),
        ]

    def _fused(self, prefix: str, outputs: dict[str, int], inputs: int) -> tuple[Tensor, Tensor | None]:
        """Weights on top of each other, and their biases if the checkpoint has any."""
        take = self._checkpoint.take
        weights = [take(f"{prefix}{name}.weight", size, inputs) for name, size in outputs.items()]
        biases = None
        if any(self._checkpoint.has(f"{prefix}{name}.bias") for name in outputs):
            biases = [take(f"{prefix}{name}.bias", size) for name, size in outputs.items()]
        return self._stored(*weights), self._stored(*biases) if biases else None

    def _stored(self, *parts: Tensor) -> Tensor:
        """Rounded and on top of each other. Weights in 16 bits stay so, as float32 would only repeat them."""
        types = self._types
        keep = types.dtype == torch.float32 and types.device.type == "cpu" and self._checkpoint.is_16_bit
        rounded = [part if keep else part.to(types.dtype) for part in parts]
        return (torch.cat(rounded) if len(rounded) > 1 else rounded[0]).to(types.device)

    def _head_norm(self, prefix: str) -> Norm:
        config = self._config
        queries = self._norm(prefix + "q_norm.weight", config.head_dim)
        keys = self._norm(prefix + "k_norm.weight", config.head_dim)
        rows = [queries.weight.expand(config.query_heads, -1), keys.weight.expand(config.kv_heads, -1)]
        return Norm(torch.cat(rows), queries.epsilon)

    def _norm(self, name: str, features: int) -> Norm:
        weight = self._checkpoint.take(name, features).to(self._types.dtype).float()
        return Norm((weight * features**0.5).to(self._types.device), features * self._config.norm_eps)
