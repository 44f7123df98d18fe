"""What the executor knows of the models before any worker starts: specs, context, text. No weights.

`ModelText` turns prompts into ids and ids into text; `prepare` finds the checkpoints and refuses pairs that
cannot work together, so that nothing is loaded in vain.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from executor import models, toy_text
from executor.config import available_cores
from executor.detokenizer import Detokenizer
from executor.errors import InvalidConfig, InvalidRequest
from executor.tokenizer import Tokenizer
from ipc import vocabulary
from ipc.messages import LaneSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from executor.config import Config
    from executor.text import Detokenizes
    from ipc.messages import LaneEngine, LaneName

_TOY_CONTEXT = 4096


class ModelText(Protocol):
    """Text in and out of a model."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, padding rows included."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]: ...

    def detokenizer(self) -> Detokenizes: ...


class CheckpointText:
    def __init__(self, directory: Path) -> None:
        """Raises InvalidConfig if the checkpoint has no usable tokenizer."""
        self.tokenizer = Tokenizer(directory)
        self.eos_token_ids = self.tokenizer.eos_token_ids

    @cached_property
    def vocabulary_size(self) -> int:
        return self.tokenizer.vocabulary.size

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """A model without a chat template gets the messages' contents as they are. Raises InvalidRequest."""
        if not self.tokenizer.has_chat_template:
            return self.encode("\n".join(message["content"] for message in messages))
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special=False)

    def detokenizer(self) -> Detokenizes:
        return Detokenizer(self.tokenizer)


class ToyText:
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def encode(self, text: str) -> list[int]:
        return toy_text.encode(text, self.vocabulary_size)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("\n".join(message["content"] for message in messages))

    def detokenizer(self) -> Detokenizes:
        return toy_text.ToyDetokenizer()


@dataclass(frozen=True, slots=True)
class Prepared:
    """`specs`: the target's, then the speculator's if there is one. `max_model_len`: in tokens."""

    specs: list[LaneSpec]
    text: ModelText
    max_model_len: int


def prepare(config: Config, progress: Callable[[str], None]) -> Prepared:
    """Find (fetch, convert) the checkpoints. Raises InvalidConfig, one line, before anything is loaded."""
    if config.engine == "toy":
        return _prepare_toys(config, progress)
    target = models.resolve(config.target, field="target", cache_dir=config.cache_dir, progress=progress)
    context = _context(target, "target")
    max_model_len = config.max_model_len or context
    if max_model_len > context:
        raise InvalidConfig(
            "max_model_len", f"max-model-len {max_model_len} is beyond the target's context; try {context}"
        )
    lane = _spec(config, "target", config.engine, str(target), max_model_len)
    return Prepared(
        _lanes(lane, speculator_spec(config, lane, progress)), CheckpointText(target), max_model_len
    )


def speculator_spec(
    config: Config, target: LaneSpec, progress: Callable[[str], None], *, field: str = "speculator"
) -> LaneSpec | None:
    """The lane that `config.speculator` asks for beside this target; None for `off`.

    Finds (fetches, converts) its checkpoint and compares vocabularies. Raises InvalidConfig about `field`.
    """
    if not config.speculates:
        return None
    if config.speculator == "ngram":
        return _spec(config, "speculator", "ngram", "", target.max_model_len)
    if config.engine == "toy":
        return _toy_speculator(config, target, field)
    draft = models.resolve(config.speculator, field=field, cache_dir=config.cache_dir, progress=progress)
    try:
        vocabulary.check_same(Path(target.model), draft)
    except (vocabulary.VocabularyMismatch, ValueError) as error:
        raise InvalidConfig(field, str(error)) from error
    draft_len = min(target.max_model_len, _context(draft, field))
    return _spec(config, "speculator", config.engine, str(draft), draft_len)


def _lanes(target: LaneSpec, speculator: LaneSpec | None) -> list[LaneSpec]:
    return [target] if speculator is None else [target, speculator]


def check_prompt(tokens: Sequence[int], vocabulary_size: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a prompt that cannot be run."""
    if not tokens:
        raise InvalidRequest("prompt", "the prompt is empty; give at least one token of text")
    check_length(len(tokens), max_model_len)
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocabulary_size:
            raise InvalidRequest(
                "prompt", f"token {token!r} is not in the vocabulary, 0 to {vocabulary_size - 1}"
            )


def check_length(length: int, max_model_len: int) -> None:
    """Raises InvalidRequest for a prompt that leaves no room to generate."""
    if length >= max_model_len:
        raise InvalidRequest(
            "prompt",
            f"the prompt has {length} tokens, the context {max_model_len}; "
            f"shorten it to {max_model_len - 1} tokens or less",
        )


def _spec(config: Config, lane: LaneName, engine: LaneEngine, model: str, max_model_len: int) -> LaneSpec:
    return LaneSpec(
        lane=lane,
        engine=engine,
        model=model,
        dtype=config.dtype,
        device=config.device,
        threads=config.threads or available_cores(),
        max_sequences=config.max_sequences,
        max_model_len=max_model_len,
    )


def _context(directory: Path, field: str) -> int:
    """The model's own context in tokens: max_position_embeddings, or what older families call it."""
    settings = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        if isinstance(settings.get(name), int):
            return int(settings[name])
    raise InvalidConfig(
        field,
        f"{field}: {directory / 'config.json'} has no max_position_embeddings; add it, for example 2048",
    )


def _prepare_toys(config: Config, progress: Callable[[str], None]) -> Prepared:
    size = int(_toy_parameter(config.target, "vocabulary", "64", "target"))
    context = int(_toy_parameter(config.target, "context", str(_TOY_CONTEXT), "target"))
    max_model_len = min(config.max_model_len or context, context)
    lane = _spec(config, "target", "toy", config.target, max_model_len)
    return Prepared(_lanes(lane, speculator_spec(config, lane, progress)), ToyText(size), max_model_len)


def _toy_speculator(config: Config, target: LaneSpec, field: str) -> LaneSpec:
    size = int(_toy_parameter(target.model, "vocabulary", "64", "target"))
    draft_size = int(_toy_parameter(config.speculator, "vocabulary", "64", field))
    if draft_size != size:
        raise InvalidConfig(
            field,
            f"vocabularies differ: target {size} tokens, speculator {draft_size}; "
            f"try {config.speculator},vocabulary={size}",
        )
    return _spec(config, "speculator", "toy", config.speculator, target.max_model_len)


def _toy_parameter(text: str, name: str, default: str, field: str) -> str:
    """One of a toy's `name=value` pairs; the worker that becomes the toy checks them all."""
    pairs = dict(pair.partition("=")[::2] for pair in text.replace(" ", "").split(","))
    value = pairs.get(name, default)
    if not value.isdigit():
        raise InvalidConfig(
            field, f"toy parameter {name} must be a whole number, got {value!r}; try {name}={default}"
        )
    return value
