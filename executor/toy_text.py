"""Text for the toy engine, whose tokens mean nothing: a token is a byte, folded into the vocabulary."""

from __future__ import annotations

_FIRST_PRINTABLE = 33
_PRINTABLE = 94


def encode(text: str, vocabulary_size: int) -> list[int]:
    return [byte % vocabulary_size for byte in text.encode()]


class ToyDetokenizer:
    def push(self, token: int) -> str:
        return chr(_FIRST_PRINTABLE + token % _PRINTABLE)

    def flush(self) -> str:
        return ""
