"""The text of one request as its tokens come. Joins detokenisation and stop strings; knows no request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from executor.detokenizer import StopStrings

if TYPE_CHECKING:
    from collections.abc import Sequence


class Detokenizes(Protocol):
    """Tokens to text, one by one; `flush` gives what an incomplete character leaves."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    def __init__(self, detokenizer: Detokenizes, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._pieces: list[str] = []
        self._stopped = False

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._pieces)

    def push(self, token: int, *, armed: bool) -> tuple[str, bool]:
        """The text that became certain, and whether a stop string ended the text at this token.

        armed: whether a stop string may end it here.
        """
        released = self._stops.push(self._detokenizer.push(token), armed)
        self._stopped = released.stop is not None
        self._pieces.append(released.text)
        return released.text, self._stopped

    def finish(self) -> str:
        """What was held back. Nothing after a stop string: that text is not part of the answer."""
        if self._stopped:
            return ""
        rest = self._stops.flush() + self._detokenizer.flush()
        self._pieces.append(rest)
        return rest
