"""What form a text must have: JSON, a schema, a regular expression, one of some texts, a grammar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from executor.errors import InvalidRequest
from ipc.codec import MAX_STRING_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Grammar:
    """`value`: nothing for json_object; a schema, a regular expression, some texts, or a Lark grammar."""

    kind: Kind
    value: str | Mapping[str, Any] | Sequence[str] = ""

    def __post_init__(self) -> None:
        """Raises InvalidRequest."""
        if self.kind not in get_args(Kind):
            kinds = ", ".join(get_args(Kind))
            raise InvalidRequest("grammar", f"its kind must be one of {kinds}, got {self.kind!r}; try regex")
        if problem := _matcher().validate_grammar(self.compiled):
            problem = " ".join(problem.split())[:500]
            raise InvalidRequest("grammar", f"{self.kind} cannot be followed: {problem}")
        if len(self.compiled.encode()) > MAX_STRING_BYTES:
            raise InvalidRequest(
                "grammar", f"{self.kind} is longer than {MAX_STRING_BYTES} bytes; try a shorter one"
            )

    @cached_property
    def compiled(self) -> str:
        """In llguidance's own form. Raises InvalidRequest for a value that is not of its kind."""
        match self.kind, self.value:
            case "json_object", _:
                return _json({"type": "object"})
            case "json_schema", str() | dict():
                return self._schema(self.value)
            case "regex", str():
                return _matcher().grammar_from_regex(self.value)
            case "grammar", str():
                return _matcher().grammar_from_lark(self.value)
            case "choice", [_, *_] if all(isinstance(text, str) and text for text in self.value):
                return _matcher().grammar_from_lark(
                    "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in self.value)
                )
        works = _WORKS[self.kind]
        raise InvalidRequest("grammar", f"{self.kind} must be {works[0]}, got {self.value!r}; try {works[1]}")

    def _schema(self, value: str | Mapping[str, Any]) -> str:
        try:
            schema = json.loads(value) if isinstance(value, str) else dict(value)
            return _json(schema)
        except ValueError as error:
            raise InvalidRequest("grammar", f"json_schema is no JSON Schema: {error}") from None


def _matcher() -> type[LLMatcher]:
    from llguidance import LLMatcher  # takes a while to import, and most answers are free

    return LLMatcher


def _json(schema: Any) -> str:
    """JSON in one line: where any space may stand, small models go on with spaces until their length is up.

    A schema that wants it otherwise says so in llguidance's own key, `x-guidance`.
    """
    return _matcher().grammar_from_json_schema(schema, defaults=_ONE_LINE)


_ONE_LINE: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_WORKS = {
    "json_schema": ("a JSON Schema, as text or a dictionary", '{"type": "object"}'),
    "regex": ("a regular expression", "[0-9]+"),
    "choice": ("a list of texts that are not empty", "['yes', 'no']"),
    "grammar": ("a grammar in Lark's form", "'start: /[0-9]+/'"),
}
