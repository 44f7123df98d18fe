"""A transformers causal LM as a lane runs it: loading, what its layers ask for, passes with a lane's context.

The only file that imports transformers. It refuses at load what would decode wrongly; it must not hold KV.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
import transformers

from workers.engines.hf_attention import NAME, Survey, attention

if TYPE_CHECKING:
    from torch import Tensor

    from ipc.messages import LaneSpec
    from workers.engines.hf_attention import Context, Layer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_HELP = "choose a decoder-only model whose layers are all causal self-attention"


def check_version(version: str) -> None:
    """Raises ImportError for an untested version: the attention interface changes between minor ones."""
    if version.split(".")[:2] != ["5", "24"]:
        raise ImportError(
            f"the hf engine needs transformers>=5.24,<5.25, found {version}; "
            "install that version, or choose the native engine"
        )


check_version(transformers.__version__)
transformers.AttentionInterface.register(NAME, attention)


class HfModel:
    """A loaded model: `layers[i]` says what layer i asks for, `dtype` is what it computes in."""

    def __init__(self, spec: LaneSpec) -> None:
        """Raises ValueError naming what cannot be served and what can, OSError for a missing checkpoint."""
        self.device = torch.device(spec.device)
        self.notes: list[str] = []
        self._model, self.dtype = self._load(spec)
        self.architecture = type(self._model).__name__
        self._config: Any = self._model.config.get_text_config(decoder=True)
        self._can_keep = "logits_to_keep" in inspect.signature(self._model.forward).parameters
        self._model.set_attn_implementation(NAME)
        self.layers, self.vocabulary_size = self._survey()

    def logits(self, ids: Tensor, positions: Tensor, wanted: Tensor, lane: Context) -> Tensor:
        """Float32 [len(wanted), vocabulary] at indices `wanted` of packed tokens ids [T] at positions [T]."""
        keep = {"logits_to_keep": wanted} if self._can_keep else {}
        output = self._model(
            input_ids=ids[None], position_ids=positions[None], use_cache=False, lane=lane, **keep
        )
        logits: Tensor = output.logits[0] if self._can_keep else output.logits[0, wanted]
        return logits.float()

    def compare(self, logits: Tensor, ids: Tensor) -> None:
        """Hold logits [T, vocabulary] of one sequence ids [T] against transformers' own attention.

        The distance of a row is relative to the spread of its logits. In 16 bits rounding alone reaches some
        per cent, and can flip an expert of a mixture, but in few rows; so there the median counts.
        Raises ValueError if they differ.
        """
        self._model.set_attn_implementation("eager")
        try:
            own = self._model(input_ids=ids[None], use_cache=False).logits[0].float()
        finally:
            self._model.set_attn_implementation(NAME)
        spread = (own - own.mean(1, keepdim=True)).norm(dim=1)
        distance = (logits - own).norm(dim=1) / spread.clamp_min(torch.finfo(torch.float32).tiny)
        exact = self.dtype is torch.float32
        worst = float(distance.max() if exact else distance.median())
        if not worst <= (1e-3 if exact else 0.1):
            raise self.refusal(f"over the lane's KV its logits are {worst:.1e} off transformers' own")

    def max_model_len(self, asked: int) -> int:
        """Tokens that a sequence may have: `asked`, or the most that can be served if 0.

        Raises ValueError naming the reason and a value that works if that is less than asked for.
        """
        limits = self._limits()
        if not limits:
            if asked == 0:
                raise ValueError(
                    f"{self.architecture} states no context length; set max_model_len, e.g. 2048"
                )
            return asked
        most, reason = min(limits)
        if asked > most:
            raise ValueError(
                f"max_model_len {asked} is too long for {self.architecture}: {reason}; use at most {most}"
            )
        if asked == 0 and most < max(limits)[0]:
            self.notes.append(f"sequences are limited to {most} tokens: {reason}")
        return asked or most

    def refusal(self, reason: str) -> ValueError:
        """The error that refuses this model."""
        return _refusal(f"serve {self.architecture}", reason)

    def _load(self, spec: LaneSpec) -> tuple[Any, torch.dtype]:
        """The model on its device in eval mode, and its dtype.

        A CPU without 16-bit arithmetic multiplies such weights many times slower than fp32 ones: there the
        weights are rounded to the 16 bits asked for, and computed with in fp32.
        """
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        dtype = DTYPES[spec.dtype]
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                spec.model,
                dtype=dtype,
                trust_remote_code=False,
                use_safetensors=True,
                local_files_only=True,
                attn_implementation="eager",
                output_loading_info=True,
            )
        except (ValueError, KeyError, ImportError) as error:
            raise _refusal(f"load {spec.model}", str(error)) from error
        if model.config.is_encoder_decoder:
            raise _refusal(f"serve {type(model).__name__}", "it has an encoder")
        self._check_weights(spec.model, report)
        if not _computes_in(dtype, self.device):
            self.notes.append(
                f"{spec.dtype} weights, computed in fp32: this CPU has no {spec.dtype} arithmetic"
            )
            dtype = torch.float32
        return model.to(device=self.device, dtype=dtype).eval(), dtype

    def _check_weights(self, name: str, report: dict[str, Any]) -> None:
        """transformers would run a model with some of its weights at random; a lane must not."""
        for kind in ("missing", "mismatched"):
            if keys := sorted(map(str, report[f"{kind}_keys"])):
                raise ValueError(
                    f"{name} has {len(keys)} {kind} weights, as {keys[0]}; use a whole checkpoint"
                )
        if keys := sorted(report["unexpected_keys"]):
            self.notes.append(f"{len(keys)} weights of the checkpoint are not used, as {keys[0]}")

    @torch.inference_mode()
    def _survey(self) -> tuple[list[Layer], int]:
        """What each layer asks for, and the width of a logit row, from a pass that computes no attention."""
        survey = Survey()
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        try:
            logits = self.logits(one, one, one, survey)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise self.refusal(str(error)) from error
        count = self._config.num_hidden_layers
        if other := sorted(set(_layer_types(self._config)) - {"full_attention", "sliding_attention"}):
            raise self.refusal(f"it has layers of type {', '.join(other)}")
        if sorted(survey.layers) != list(range(count)):
            found = len(survey.layers)
            raise self.refusal(
                f"{found} of its {count} layers attend through transformers' AttentionInterface"
            )
        return [survey.layers[index] for index in range(count)], logits.shape[1]

    def _limits(self) -> list[tuple[int, str]]:
        """Every bound on the length of a sequence, with its reason."""
        limits = []
        own = getattr(self._config, "max_position_embeddings", None)
        if own is not None:
            limits.append((int(own), "that is its context"))
        for rope in _rope_parameters(self._config):
            if rope.get("rope_type") == "longrope":
                original = int(rope["original_max_position_embeddings"])
                limits.append((original, "beyond, longrope depends on what else is in the batch"))
        windowed = {index for index, layer in enumerate(self.layers) if layer.form.sliding_window is not None}
        if windowless := _sliding_layers(self._config) - windowed:
            reason = f"layer {min(windowless)} does not pass its sliding window to the attention"
            limits.append((int(self._config.sliding_window), reason))
        return limits


def _refusal(what: str, reason: str) -> ValueError:
    return ValueError(f"the hf engine cannot {what}: {' '.join(reason.split())}; {_HELP}")


def _computes_in(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrix products of this dtype are no slower there than fp32 ones."""
    if dtype is torch.float32 or device.type != "cpu":
        return True
    return dtype is torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Rotary settings of a model, one per kind of layer where they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope] if "rope_type" in rope else [each for each in rope.values() if isinstance(each, dict)]


def _sliding_layers(config: Any) -> set[int]:
    """Layers to which the configuration gives a sliding window."""
    if getattr(config, "sliding_window", None) is None or not getattr(config, "use_sliding_window", True):
        return set()
    kinds = _layer_types(config) or ["sliding_attention"] * config.num_hidden_layers
    return {index for index, kind in enumerate(kinds) if kind == "sliding_attention"}


def _layer_types(config: Any) -> list[str]:
    """Kind of each layer; empty for models that have only one kind."""
    return list(getattr(config, "layer_types", None) or ())
