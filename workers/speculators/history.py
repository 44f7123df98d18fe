"""A bounded ring of tokens in which the places that a context occurred at before are found in constant time.

Hash chains as in LZ77 compressors: per context length a table from the context's hash to its latest place,
and from each place to the one before it. What the ring overwrites is forgotten, oldest first, without any
clean-up, so memory and the time of a lookup are the same however long it runs.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

SEPARATOR = -1
"""Stands between texts, so that no match runs from one into the next."""
CONTEXTS = (4, 2)
"""Lengths of context by which places are found; the first that finds any is taken."""
MAX_MATCH = 12
"""Matches are not measured beyond this many tokens."""
MAX_PLACES = 8
"""Of the places that a context occurred at, the latest so many are looked at."""

TOKEN_BYTES = 4 + 16 * len(CONTEXTS)
"""Memory that a token of capacity takes."""


class Guess(NamedTuple):
    """`token` followed the longest known match, of `length` tokens, at `votes` of `places` places."""

    token: int
    length: int
    votes: int
    places: int


class History:
    def __init__(self, capacity: int) -> None:
        """`capacity` in tokens, rounded up to a power of two."""
        size = 1 << max(6, (capacity - 1).bit_length())
        self._mask = size - 1
        self._end = 0
        self._tokens = array("i", [SEPARATOR]) * size
        self._latest = [array("q", [-1]) * size for _ in CONTEXTS]
        self._before = [array("q", [-1]) * size for _ in CONTEXTS]

    def __len__(self) -> int:
        """Tokens and separators held."""
        return min(self._end, self._mask + 1)

    @property
    def told(self) -> int:
        """Tokens and separators ever added."""
        return self._end

    @property
    def nbytes(self) -> int:
        """Memory that it takes, now and always."""
        arrays = [self._tokens, *self._latest, *self._before]
        return sum(len(values) * values.itemsize for values in arrays)

    def extend(self, tokens: Sequence[int]) -> None:
        """Go on with the text at the end."""
        ring, mask, longest = self._tokens, self._mask, CONTEXTS[0]
        recent = [ring[place & mask] for place in range(max(0, self._end - longest), self._end)]
        for token in tokens:
            ring[self._end & mask] = token
            self._end += 1
            recent = [*recent[-longest + 1 :], token]
            for context, latest, before in zip(CONTEXTS, self._latest, self._before, strict=True):
                slot = hash(tuple(recent[-context:])) & mask
                before[self._end & mask] = latest[slot]
                latest[slot] = self._end

    def walk(self, context: Sequence[int]) -> Walk:
        """Guesses of what follows a context, token by token."""
        return Walk(self, context)

    def places(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """Length of the match, and place of the token that followed it; for the longest matches only."""
        for size, latest, before in zip(CONTEXTS, self._latest, self._before, strict=True):
            if len(context) >= size:
                place = latest[hash(tuple(context[-size:])) & self._mask]
                if place >= 0 and (found := self._follow(place, before, context, size)):
                    longest = max(found)[0]
                    return [match for match in found if match[0] == longest]
        return []

    def token(self, place: int) -> int:
        """SEPARATOR for a place at which nothing stands yet."""
        return self._tokens[place & self._mask] if place < self._end else SEPARATOR

    def _follow(
        self, place: int, before: array[int], context: Sequence[int], least: int
    ) -> list[tuple[int, int]]:
        """The chain from a place on, as far as it leads to matches of at least so many tokens."""
        ring, mask = self._tokens, self._mask
        oldest = max(0, self._end - mask - 1 + MAX_MATCH)
        longest = min(MAX_MATCH, len(context))
        found: list[tuple[int, int]] = []
        steps = 2 * MAX_PLACES  # places of other contexts with the same hash are passed over, within limits
        while place > oldest and len(found) < MAX_PLACES and steps:
            steps -= 1
            length = 0
            reach = min(longest, place)
            while length < reach and ring[(place - 1 - length) & mask] == context[-1 - length]:
                length += 1
            if length >= least and place < self._end:
                found.append((length, place))
            place = before[place & mask]
        return found


class Walk:
    """A path of guesses. What was said after the context need not be what was guessed."""

    def __init__(self, history: History, context: Sequence[int]) -> None:
        self._history = history
        self._context = list(context[-MAX_MATCH:])
        self._places: list[tuple[int, int]] = []
        self._searched = False

    def guess(self) -> Guess | None:
        """The most frequent next token, the latest of those that are tied."""
        if not self._places and not self._searched:
            self._places = self._history.places(self._context)
            self._searched = True
        votes: dict[int, int] = {}
        for _, place in self._places:
            token = self._history.token(place)
            votes[token] = votes.get(token, 0) + 1
        votes.pop(SEPARATOR, None)
        if not votes:
            return None
        token = max(votes, key=votes.__getitem__)
        return Guess(token, self._places[0][0], votes[token], len(self._places))

    def go(self, token: int) -> None:
        """Let a token follow. Places at which another one did are dropped; if none is left, others are
        looked for when they are asked for."""
        self._context = [*self._context[1 - MAX_MATCH :], token]
        history = self._history
        self._places = [
            (min(length + 1, MAX_MATCH), place + 1)
            for length, place in self._places
            if history.token(place) == token and history.token(place + 1) != SEPARATOR
        ]
        self._searched = False
