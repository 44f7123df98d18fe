"""What the executor knows of the models before any worker starts: specs, context, text. No weights.

`ModelText` turns prompts into ids and ids into text; `prepare` finds the checkpoints and refuses pairs that
cannot work together, so that nothing is loaded in vain.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import msgspec

from executor import address, checkpoint, eagle3, heads, models, shipped, toy_text
from executor.config import check_servers
from executor.detokenizer import Detokenizer, token_bytes
from executor.errors import InvalidConfig, InvalidRequest
from executor.models import DEFAULT_TARGET
from ipc import q_rows, vocabulary
from ipc.messages import LaneSpec, Vocabulary
from ipc.toy import ToyParameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from executor.config import Config
    from executor.text import Detokenizes
    from ipc.messages import HeadSpec, LaneEngine, LaneName
_NO_MODEL = ("suffix", "cascade", "eagle", "ngram", "off")
"""Speculators that have no checkpoint."""
LOOKUP_CONTEXT = 8192
"""Longest sequence in tokens of a server that looks tokens up, unless it is told."""


class ModelText(Protocol):
    """Text in and out of a model."""

    @property
    def eos_token_ids(self) -> frozenset[int]: ...

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, padding rows included."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_part(self, text: str) -> list[int]:
        """Text that stands anywhere in another one."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str:
        """All of the text, special tokens spelled out."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to the text; of a special token its name."""
        ...

    def detokenizer(self) -> Detokenizes: ...


class CheckpointText:
    def __init__(self, directory: Path) -> None:
        """Raises InvalidConfig if the checkpoint has no usable tokenizer."""
        from executor.tokenizer import Tokenizer  # takes a while to import, and toys need none

        self.tokenizer = Tokenizer(directory)
        self.eos_token_ids = self.tokenizer.eos_token_ids

    @cached_property
    def vocabulary_size(self) -> int:
        return self.tokenizer.vocabulary.size

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def encode_part(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special=False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """A model without a chat template gets the messages' contents as they are. Raises InvalidRequest."""
        if not self.tokenizer.has_chat_template:
            return self.encode(_contents(messages, tools))
        chat = self.tokenizer.render_chat(messages, tools=tools)
        if tools and chat == self.tokenizer.render_chat(messages):
            raise InvalidRequest("tools", "the model's chat template has no place for tools; leave them out")
        for i, key in _said_beside_content(messages):
            without = None
            with suppress(InvalidRequest):  # perhaps the template cannot do without
                others = [*messages[:i], {**messages[i], key: None}, *messages[i + 1 :]]
                without = self.tokenizer.render_chat(others, tools=tools)
            if chat == without:
                _no_place(i, key)
        return self.tokenizer.encode(chat, add_special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special=False)

    def token_bytes(self, token: int) -> bytes:
        return token_bytes(self.tokenizer, token)

    def detokenizer(self) -> Detokenizes:
        return Detokenizer(self.tokenizer)


class ToyText:
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, vocabulary_size: int) -> None:
        self.vocabulary_size = vocabulary_size

    def encode(self, text: str) -> list[int]:
        return toy_text.encode(text, self.vocabulary_size)

    def encode_part(self, text: str) -> list[int]:
        return self.encode(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        return self.encode(_contents(messages, tools))

    def decode(self, tokens: Sequence[int]) -> str:
        detokenizer = self.detokenizer()
        return "".join(detokenizer.push(token) for token in tokens)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()

    def detokenizer(self) -> Detokenizes:
        return toy_text.ToyDetokenizer()


def _contents(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> str:
    """A chat without a template. Raises InvalidRequest."""
    if tools:
        raise InvalidRequest("tools", "tools are for models with a chat template; leave them out")
    for i, key in _said_beside_content(messages):
        _no_place(i, key)
    return "\n".join(message.get("content") or "" for message in messages)


def _said_beside_content(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str]]:
    """Message and key of what a model must be told, too, or the chat is another one."""
    for i, message in enumerate(messages):
        for key in ("name", "tool_calls", "function_call", "refusal"):
            # Which tool or function answers is said by the order of messages.
            if message.get(key) is not None and (key, message.get("role")) not in _SAID_BY_ORDER:
                yield i, key


_SAID_BY_ORDER = (("name", "tool"), ("name", "function"))


def _no_place(i: int, key: str) -> NoReturn:
    field = f"messages[{i}].{key}"
    raise InvalidRequest(field, f"{field}: the model's chat template has no place for it; leave it out")


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
    target = _checkpoint(config, config.target, "target", progress)
    checkpoint.check_ranks(target, config.target_ranks)
    max_model_len = _within(config.max_model_len, checkpoint.context(target, "target"))
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
    if address.is_address(config.speculator):
        return _remote(config, target, field)
    if config.speculator == "ngram":
        return _spec(config, "speculator", "ngram", "", target.max_model_len)
    if config.speculator == "suffix":
        lane = _spec(config, "speculator", "suffix", "", target.max_model_len)
        return msgspec.structs.replace(lane, prior=_prior(config, target))
    if config.speculator in ("eagle", "cascade") or config.speculator.endswith(heads.SUFFIX):
        return _head(config, target, field)
    if config.engine == "toy":
        return _toy_speculator(config, target, field)
    draft = _found(config, config.speculator, field, progress, also=_NO_MODEL)
    if eagle3.is_head(draft, field):
        settings = checkpoint.read_object(Path(target.model) / "config.json", field)
        return _with_head(config, target, eagle3.head_spec(draft, target, settings, field), "cascade")
    if config.engine == "native":
        checkpoint.check_native(draft, field)
    try:
        vocabulary.check_same(Path(target.model), draft)
    except (vocabulary.VocabularyMismatch, ValueError, OSError) as error:
        raise InvalidConfig(field, str(error)) from error
    draft_len = min(target.max_model_len, checkpoint.context(draft, field))
    lane = _spec(config, "speculator", config.engine, str(draft), draft_len)
    return _with_q_arena(config, lane, vocabulary.read(draft).size)


def server_spec(config: Config, progress: Callable[[str], None]) -> LaneSpec:
    """The lane of a speculator server, which has no target beside it; `config.target` counts for heads only.

    `config.max_sequences` is of all clients together. Raises InvalidConfig.
    """
    name = config.speculator
    if name in ("ngram", "suffix"):
        engine: LaneEngine = "ngram" if name == "ngram" else "suffix"
        return _spec(config, "speculator", engine, "", config.max_model_len or LOOKUP_CONTEXT)
    if not config.speculates or address.is_address(name):
        raise InvalidConfig("speculator", f"speculator {name} drafts nothing here; try ngram")
    if config.engine == "toy":
        context, model = _toy(name, "speculator", f"ngram, or {ToyParameters()}").context, name
    else:
        is_head = name in _NO_MODEL or name.endswith(heads.SUFFIX)
        if not is_head:
            found = _found(config, name, "speculator", progress, also=_NO_MODEL)
            is_head = eagle3.is_head(found, "speculator")
        field, whose = ("target", config.target) if is_head else ("speculator", name)
        model = str(_checkpoint(config, whose, field, progress))
        context = checkpoint.context(Path(model), field)
    # Of a model that drafts for targets of its own kind, or of the target whose head it is.
    target = _spec(config, "target", config.engine, model, _within(config.max_model_len, context))
    spec = speculator_spec(config, target, progress)
    assert spec is not None, "it speculates"
    return msgspec.structs.replace(spec, q_arena=0)  # targets elsewhere reach no memory of this host


def _remote(config: Config, target: LaneSpec, field: str) -> LaneSpec:
    """A lane at a server. Raises InvalidConfig about `field` or `keys`."""
    check_servers(field, config.speculator, config.keys)
    servers = ",".join(server.text for server in address.parse_several(config.speculator, field))
    lane = _spec(config, "speculator", "remote", servers, target.max_model_len)
    return msgspec.structs.replace(lane, device="cpu")  # of this host it takes nothing


def _head(config: Config, target: LaneSpec, field: str) -> LaneSpec:
    """A lane with a drafting head: the shipped one, or the user's own; with lookups unless it is `eagle`.

    Raises InvalidConfig about `field`.
    """
    vocabulary_ = vocabulary.read(Path(target.model)) if config.engine != "toy" else Vocabulary(0, "")
    head = heads.head_spec(config.speculator, target, vocabulary_, field)
    return _with_head(config, target, head, "eagle" if config.speculator == "eagle" else "cascade")


def _with_head(config: Config, target: LaneSpec, head: HeadSpec, engine: LaneEngine) -> LaneSpec:
    lane = _spec(config, "speculator", engine, target.model, target.max_model_len)
    prior = _prior(config, target) if engine == "cascade" else ""
    size = vocabulary.read(Path(target.model)).size
    return _with_q_arena(config, msgspec.structs.replace(lane, head=head, prior=prior), size)


def _prior(config: Config, target: LaneSpec) -> str:
    """The shipped file of what this target writes; empty for one that none was made for."""
    if config.engine == "toy":
        return ""
    return shipped.prior(vocabulary.read(Path(target.model)).fingerprint)


def _checkpoint(config: Config, name: str, field: str, progress: Callable[[str], None]) -> Path:
    """The directory of a model that the engine can run, as far as can be seen without its weights."""
    found = _found(config, name, field, progress)
    if eagle3.is_head(found, field):
        raise InvalidConfig(field, f"{field} {found} is a drafting head and no model; try {DEFAULT_TARGET}")
    if config.engine == "native":
        checkpoint.check_native(found, field)
    return found


def _found(
    config: Config, name: str, field: str, progress: Callable[[str], None], *, also: Sequence[str] = ()
) -> Path:
    return models.resolve(name, field=field, also=also, cache_dir=config.cache_dir, progress=progress)


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
    ranks = config.target_ranks if lane == "target" else 1
    return LaneSpec(
        lane=lane,
        engine=engine,
        model=model,
        dtype=config.dtype,
        device=config.placements[lane].device,
        threads=max(1, config.threads_of(lane) // ranks),
        max_sequences=config.max_sequences,
        max_model_len=max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        reuse_prefixes=config.reuse_prefixes,
        ranks=ranks,
        first_gpu=0 if lane == "target" else config.target_ranks,
        acceptance=config.acceptance,
        q_rows=config.q_rows,
    )


def _within(asked: int | None, context: int) -> int:
    """Longest sequence in tokens, where `asked` None is all of the target's context."""
    if asked is not None and asked > context:
        raise InvalidConfig(
            "max_model_len", f"max-model-len {asked} is beyond the target's context; try {context}"
        )
    return asked or context


def _prepare_toys(config: Config, progress: Callable[[str], None]) -> Prepared:
    toy = _toy(config.target, "target", str(ToyParameters()))
    max_model_len = _within(config.max_model_len, toy.context)
    lane = _spec(config, "target", "toy", config.target, max_model_len)
    text = ToyText(toy.vocabulary)
    return Prepared(_lanes(lane, speculator_spec(config, lane, progress)), text, max_model_len)


def _toy_speculator(config: Config, target: LaneSpec, field: str) -> LaneSpec:
    size = ToyParameters.parse(target.model).vocabulary
    toy = _toy(config.speculator, field, f"ngram, or {ToyParameters(vocabulary=size, agree=0.8)}")
    if toy.vocabulary != size:
        raise InvalidConfig(
            field,
            f"vocabularies differ: target {size} tokens, speculator {toy.vocabulary}; "
            f"try {replace(toy, vocabulary=size)}",
        )
    lane = _spec(config, "speculator", "toy", config.speculator, min(target.max_model_len, toy.context))
    return _with_q_arena(config, lane, size)


def _with_q_arena(config: Config, lane: LaneSpec, vocabulary_size: int) -> LaneSpec:
    """With room in an arena for the full q rows of two drafts and of what is prepared after one, if it sends
    any and they are worth an arena."""
    row = q_rows.row_bytes(vocabulary_size)
    if lane.acceptance == "coupled" or lane.q_rows != "full" or row < q_rows.ARENA_ROW_BYTES:
        return lane
    rows = (2 + config.setting.hypotheses) * lane.max_sequences * lane.num_speculative_tokens
    return msgspec.structs.replace(lane, q_arena=rows * (row + 256))


def _toy(text: str, field: str, works: str) -> ToyParameters:
    try:
        return ToyParameters.parse(text)
    except ValueError as error:
        raise InvalidConfig(field, f"{field} {text!r}: {error}; try {works}") from error
