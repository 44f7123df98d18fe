"""The distribution that a draft token is drawn from, q, and where a speculator says which it was.

It is rounded to what crosses the wire before anything is drawn, so the target divides by the very numbers
that the token was drawn with. Pure: must not import torch; knows no model.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ipc import q_rows
from workers import distribution, noise

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Sequence

    from ipc.messages import QRow
    from workers.distribution import Distribution
    from workers.sequence import LaneSequence


class Q:
    """`weights` float32, of `tokens`, or of the whole vocabulary if that is None; they need not sum to 1."""

    def __init__(self, row: QRow) -> None:
        """Of a row that was drawn from: see ipc.q_rows.fault for those that cannot be."""
        self.row = row
        self.tokens: array[int] | None
        self.weights: array[float]
        self.tokens, self.weights = q_rows.unpack(row)

    @classmethod
    def of(cls, row: QRow, token: int) -> Q:
        """What `token` was drawn from; a token that was looked up counts as drawn from itself alone."""
        return cls(q_rows.pack([token], [1.0]) if row == q_rows.LOOKED_UP else row)

    @cached_property
    def total(self) -> float:
        return sum(self.weights)

    @cached_property
    def best(self) -> float:
        """The largest probability."""
        return max(self.weights) / self.total

    @property
    def named(self) -> Sequence[int]:
        """The tokens that the weights are of."""
        return range(len(self.weights)) if self.tokens is None else self.tokens

    def probability(self, token: int) -> float:
        index = token if self.tokens is None else self.tokens.index(token)
        return self.weights[index] / self.total

    def pick(self, fraction: float) -> int:
        """The token at this fraction, 0 … 1, of the mass."""
        return self.named[distribution.pick(self.weights, fraction)]


class DrawnFrom:
    """Where a speculator draws its guesses of one sequence, and leaves what each was drawn from."""

    def __init__(self, width: int, place: Callable[[QRow], QRow] = lambda row: row) -> None:
        """`width`: how many tokens a row may have; see ipc.q_rows.width. `place`: makes it ready to go."""
        self.rows: list[QRow] = []
        self._width = width
        self._place = place

    def q(self, guessed: Distribution) -> Q:
        """What the next guess is to be drawn from, if its source is asked at all: that must be decided by
        this row and not by the token."""
        return Q(guessed.row(self._width))

    def draw(self, q: Q, sequence: LaneSequence, depth: int) -> int:
        """The guess with index `depth` in a draft; its row is kept."""
        self.rows.append(self._place(q.row))
        position = len(sequence.tokens) + depth
        return q.pick(noise.fraction(sequence.sampling.seed, position, noise.DRAFT, depth))

    def look_up(self) -> None:
        """The next guess was not drawn."""
        self.rows.append(q_rows.LOOKED_UP)
