"""Token ids to text as they come, and the stop strings that end it.

It owns what text is certain and what must be held back. It must not know requests; the caller decides when a
stop string counts.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.tokenizer import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "\u2581"
"""How vocabularies of pieces spell a space."""


class Detokenizer:
    """Incremental `Tokenizer.decode`: all pushes and the flush together are the text of all ids at once."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True) -> None:
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._text: _ByteText | _PieceText
        self._text = _ByteText(tokenizer) if _joins_bytes(tokenizer) else _PieceText(tokenizer)

    def push(self, token: int) -> str:
        """The text that this token makes certain; empty while a character is incomplete."""
        return "" if token in self._skipped else self._text.push(token)

    def flush(self) -> str:
        """What was held back, at the end of the text: U+FFFD for an incomplete character."""
        return self._text.flush()


def _joins_bytes(tokenizer: Tokenizer) -> bool:
    """Asked of the decoder by example, since it may be composed: the two UTF-8 bytes of é, as spelled."""
    decoder = tokenizer.backend.decoder
    return decoder is not None and decoder.decode(["\u00c3", "\u00a9"]) == "\u00e9"


class _ByteText:
    """Byte-level vocabularies: every token is a string of bytes, and the text is their UTF-8."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer.backend
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        spelling = self._backend.id_to_token(token)
        return "" if spelling is None else self._utf8.decode(_spelled_bytes(spelling))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _PieceText:
    """Vocabularies of text pieces with a token <0xXX> for each byte that no piece covers.

    A piece may read otherwise at the start of a text than later, so it is decoded behind an anchor: the
    first ids of this text up to a piece. Bytes are held until their run ends: only then is it known whether
    they are UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = []
        self._anchor_length = 0
        self._run: list[int] = []

    def push(self, token: int) -> str:
        spelling = self._tokenizer.backend.id_to_token(token)
        if spelling is None:
            return ""
        self._run.append(token)
        if _BYTE_TOKEN.fullmatch(spelling):
            return ""
        ids = self._run
        text = self.flush()
        if not self._anchor:
            self._anchor, self._anchor_length = ids, len(text)
        return text

    def flush(self) -> str:
        ids, self._run = self._run, []
        return self._tokenizer.decode([*self._anchor, *ids], skip_special=False)[self._anchor_length :]


def _alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others as U+0100 upwards, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _alphabet()


def _spelled_bytes(spelling: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in spelling])
    except KeyError:  # an added token, which stands for itself
        return spelling.encode()


def token_bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What one token stands for by itself; nothing for an id without a token."""
    spelling = tokenizer.backend.id_to_token(token)
    if spelling is None:
        return b""
    if _joins_bytes(tokenizer):
        return _spelled_bytes(spelling)
    if _BYTE_TOKEN.fullmatch(spelling):
        return bytes([int(spelling[3:5], 16)])
    return str(spelling).replace(_SPACE, " ").encode()


class Released(NamedTuple):
    """Text that may be shown, and the stop string that ended it at this push, if one did."""

    text: str
    stop: str | None


class StopStrings:
    """Cuts a text before the first stop string in it, however the text is divided into pushes.

    A stop string is found at its last character; of several that end there, the longest counts. Text that may
    become a stop string is held back until it cannot (Knuth, Morris and Pratt's automaton, one per string).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> Released:
        """Take the text of one token; the text ends at this token if `stop` is not None.

        armed: a stop string whose last character is in this piece counts. Its first may be in earlier pieces,
        armed or not.
        """
        if not self._stops:
            return Released(piece, None)
        text = self._held + piece
        for end, character in enumerate(piece, len(self._held) + 1):
            found = self._step(character)
            if armed and found:
                self._held, self._matched = "", [0] * len(self._stops)
                return Released(text[: end - len(found)], found)
        certain = len(text) - max(self._matched)
        self._held = text[certain:]
        return Released(text[:certain], None)

    def flush(self) -> str:
        """What was held back, at the end of a text that no stop string ended."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, character: str) -> str:
        """Advance every automaton; the longest stop string that this character completes, or ""."""
        found = ""
        for i, (stop, borders) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched]
            if stop[matched] == character:
                matched += 1
            if matched == len(stop):
                found = max(found, stop, key=len)
                matched = borders[matched]
            self._matched[i] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each length n, the length of the longest proper prefix of stop[:n] that is also its suffix."""
    borders = [0, 0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length]
        borders.append(length + (stop[length] == character))
    return borders
