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
        self._stops = StopStrings(stops) if stops else None
        self._pieces: list[str] = []
        self._stopped = False

    @property
    def text(self) -> str:
        """All that was given out."""
        return "".join(self._pieces)

    def push(self, tokens: Sequence[int], *, armed_from: int) -> tuple[list[str], int | None]:
        """The text that became certain at each token, and the index of the one at which a stop string ended
        it, or None: no text follows.

        A stop string may end the text at the tokens from index `armed_from` on.
        """
        stop = None
        if self._stops is None:
            pieces = [self._detokenizer.push(token) for token in tokens]
        else:
            pieces, stop = self._push_until_stop(self._stops, tokens, armed_from)
        self._pieces += pieces
        return pieces, stop

    def _push_until_stop(
        self, stops: StopStrings, tokens: Sequence[int], armed_from: int
    ) -> tuple[list[str], int | None]:
        pieces = []
        for i, token in enumerate(tokens):
            released = stops.push(self._detokenizer.push(token), i >= armed_from)
            pieces.append(released.text)
            if released.stop is not None:
                self._stopped = True
                return pieces, i
        return pieces, None

    def finish(self) -> str:
        """What was held back. Nothing after a stop string: that text is not part of the answer."""
        if self._stopped:
            return ""
        rest = (self._stops.flush() if self._stops else "") + self._detokenizer.flush()
        self._pieces.append(rest)
        return rest
