"""Text to token ids and back, and chats to text, from the files of a checkpoint directory.

It owns reading tokenizer.json, tokenizer_config.json and the chat template. It must not know requests or
lanes.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from executor.checkpoint import read_object
from executor.errors import InvalidConfig, InvalidRequest
from ipc import vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from jinja2.parser import Parser

    from ipc.messages import Vocabulary


class Tokenizer:
    """The tokenizer of one model.

    backend: the `tokenizers` object. special_ids: ids that stand for no text of their own, such as
    end-of-text. eos_token_ids: ids that end a text, as any of generation_config.json, config.json and
    tokenizer_config.json says. Raises InvalidConfig for `field` if the directory has no tokenizer.json, or an
    unreadable one.
    """

    def __init__(self, directory: Path, *, field: str = "target") -> None:
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise InvalidConfig(
                field,
                f"{field} {directory} has no tokenizer.json; save the tokenizer there in that format, "
                f"or use a checkpoint that has one",
            )
        try:
            self.backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises bare Exception
            raise InvalidConfig(
                field, f"{field}: cannot read {path}: {error}; fetch the checkpoint again"
            ) from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self._directory = directory
        self._field = field
        self._config = _settings(directory / "tokenizer_config.json", field)
        self._mark_special()
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.eos_token_ids = self._eos_token_ids()
        self._template_source = self._find_template()

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids. Special tokens spelled out in the text become their ids, as in Hugging Face.

        add_special: put the model's own opening tokens before the text, if it has any; not for rendered
        chats, whose template writes them.
        """
        ids: list[int] = self.backend.encode(text, add_special_tokens=add_special).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special)
        return text

    @property
    def has_chat_template(self) -> bool:
        return self._template_source is not None

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return vocabulary.read(self._directory)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """The text of a chat, ready for `encode(…, add_special=False)`.

        messages: role and content each; keys whose value is None count as absent. tools: what the template
        may tell the model of. Raises InvalidRequest for "messages" if there is no template or it refuses
        them.
        """
        if self._template_source is None:
            raise InvalidRequest(
                "messages", f"{self._directory.name} has no chat template; send a plain prompt instead"
            )
        try:
            # A template is code of whoever made the checkpoint: only plain data may reach it.
            plain, functions = json.loads(json.dumps([list(messages), list(tools)]))
            present = [
                {key: value for key, value in message.items() if value is not None} for message in plain
            ]
            return self._template.render(
                messages=present,
                tools=functions or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_texts,
            )
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError, KeyError) as error:
            raise InvalidRequest("messages", f"the chat template refuses these messages: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        assert self._template_source is not None
        try:
            return _environment().from_string(self._template_source)
        except jinja2.TemplateError as error:
            raise InvalidConfig(
                self._field, f"{self._field}: the chat template of {self._directory} is broken: {error}"
            ) from error

    @cached_property
    def _special_texts(self) -> dict[str, str]:
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        return {name: text for name in names if (text := _text(self._config.get(name))) is not None}

    def _mark_special(self) -> None:
        """Like Hugging Face, treat what tokenizer_config.json names as special, whatever else says."""
        known = {token.content for token in self.backend.get_added_tokens_decoder().values() if token.special}
        new = [text for text in self._special_texts.values() if text not in known]
        self.backend.add_special_tokens([text for text in new if self.backend.token_to_id(text) is not None])

    def _eos_token_ids(self) -> frozenset[int]:
        ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = _settings(self._directory / name, self._field).get("eos_token_id")
            ids.update(value if isinstance(value, list) else [] if value is None else [value])
        text = _text(self._config.get("eos_token"))
        token = None if text is None else self.backend.token_to_id(text)
        return frozenset(ids if token is None else ids | {token})

    def _find_template(self) -> str | None:
        file = self._directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self._config.get("chat_template")
        if isinstance(template, list):  # several, by name
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template if isinstance(template, str) else None


class _Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks a model's words for training; here it does nothing."""

    tags = {"generation"}  # noqa: RUF012 — declared so by jinja2

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """What chat templates are written for: the settings and names that Hugging Face documents for them."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which a model should not see.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return environment


def _settings(path: Path, field: str) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file."""
    return read_object(path, field) if path.is_file() else {}


def _text(token: Any) -> str | None:
    """A special token of tokenizer_config.json: its text, or an object with the text in `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
