"""One sequence's draft by head and lookups while it grows, and what is left of it for branches to start from.

Says when the head is worth asking. Knows neither other sequences nor how guesses are made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.speculators.head import Entry
from workers.speculators.proposals import Draft, Proposal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from workers.engines.engine import Draw
    from workers.speculator import Ask
    from workers.speculators.head import Context
    from workers.speculators.lookup import Path as LookupPath

SURE = 0.85
"""A lookup that is right so often needs no second opinion."""
HEAD_REACH = 0.15
"""The head is not asked where the target gets to with a smaller probability: a step of it costs about a
twentieth of a target step, a token is worth about half of one, and a guess is right half of the time."""


@dataclass(slots=True)
class Held:
    """What the head holds of a sequence: `row` [hidden] is the latest that came from the target, of the token
    at `end` - 1; the rows before it are in the context. `depth`: how many steps of the head it is away from
    such a row, if it is the head's own."""

    context: Context
    row: Tensor | None = None
    end: int = 0
    depth: int = 0


@dataclass(slots=True)
class Trail:
    """A draft after `start` tokens, for branches to leave it at any place: the row that each token was
    guessed from, None where the head was not asked, and where the context ended then. `depth`: see Held, of
    the row that the draft began from."""

    start: int
    depth: int
    tokens: list[int]
    rows: list[Tensor | None]
    ends: list[int]
    context: Context

    def leave(self, start: int, stood: Sequence[int]) -> Held:
        """What the head holds after the first tokens of the draft and another one."""
        place = len(stood)
        if start != self.start or self.tokens[:place] != list(stood) or place >= len(self.rows):
            return Held(self.context.fork(0))
        depth = self.depth + place + 1
        return Held(self.context.fork(self.ends[place]), self.rows[place], start + place, depth)


class Chain:
    """One sequence's draft while it grows. `row` and `token` are what the head's next step starts from."""

    def __init__(self, ask: Ask, held: Held, path: LookupPath | None) -> None:
        tokens = ask.sequence.tokens
        self.sequence = ask.sequence
        self.draft = Draft(ask.k)
        self.drawn_from = ask.drawn_from
        self.path = path
        self.context = held.context
        # The row of the last token but one and the last token: the target has not run that one yet.
        self.row = held.row if held.end == len(tokens) - 1 else None
        self.depth = held.depth
        self.wants_others = ask.others is not None
        self.token = tokens[-1]
        self.ended = ask.k == 0
        self._rows: list[Tensor | None] = []
        self._ends: list[int] = []

    @property
    def trail(self) -> Trail:
        start = len(self.sequence.tokens)
        return Trail(start, self.depth, self.draft.tokens, self._rows, self._ends, self.context)

    @property
    def steps_away(self) -> int:
        """How many steps of its own the head is away from the target's rows."""
        return self.depth + len(self.draft.tokens)

    def ask_lookup(self) -> list[Proposal]:
        return self.path.proposals() if self.path is not None else []

    def wants_head(self, proposals: list[Proposal]) -> bool:
        sure = any(proposal.expected >= SURE for proposal in proposals)
        return self.row is not None and not sure and self.draft.reach >= HEAD_REACH

    def go(
        self,
        proposals: list[Proposal],
        row: Tensor | None,
        aside: Sequence[Proposal] = (),
        runners_up: Sequence[int] = (),
    ) -> None:
        """Take the best; `row` is what the head goes on from, if it was asked. `aside`, `runners_up`: see
        Draft.add."""
        self.row = row
        self._rows.append(row)
        self._ends.append(self.context.end)
        token = self.draft.add(proposals, self._settle, aside, runners_up)
        self.ended = token is None or self.draft.full
        if token is not None:
            self.token = token
            if self.path is not None:
                self.path.go(token)

    def _settle(self, proposal: Proposal) -> Proposal:
        """Draw the token of what is taken, if it was not looked up; and say so."""
        if self.drawn_from is None:
            return proposal
        if proposal.q is None:
            self.drawn_from.look_up()
            return proposal
        token = self.drawn_from.draw(proposal.q, self.sequence, len(self.draft.tokens))
        return proposal._replace(token=token)

    @property
    def entry(self) -> Entry:
        """The head's next step. Only for those that want it."""
        assert self.row is not None, "the head has nothing to start from"
        position = len(self.sequence.tokens) - 2 + len(self.draft.tokens)
        return Entry(self.row, self.token, position, self.context)

    @property
    def draw(self) -> Draw:
        return self.sequence.draws(self.draft.tokens, rows=1)[0]
