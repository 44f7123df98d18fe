"""Guesses for the next token from several sources, which of them to take, and what became of them.

A source can say of what kind its guess is; what such guesses were worth so far is its expected worth now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from workers.q_row import Q
    from workers.sequence import LaneSequence
    from workers.speculators.calibration import Calibration

LEAST_REACH = 0.02
"""A draft ends where the target gets to with a smaller probability: verifying a token is not quite free."""


NOT_DRAWN = -1


class Proposal(NamedTuple):
    """A token, the probability that it is what the target says, and the kind of guess that it is.

    `q`: what the token is drawn from once the proposal is taken; until then it is NOT_DRAWN, so that it
    cannot decide over that.
    """

    token: int
    expected: float
    kind: Hashable
    q: Q | None = None


def best(proposals: Iterable[Proposal]) -> Proposal | None:
    """The most promising; the first of those that are tied."""
    return max(proposals, key=lambda proposal: proposal.expected, default=None)


class Draft:
    """A draft in the making: `tokens`, how probable each is after those before it, and `reach`, the
    probability that the target gets to the end."""

    def __init__(self, k: int) -> None:
        self.tokens: list[int] = []
        self.expected: list[float] = []
        self.reach = 1.0
        self.steps: list[list[Proposal]] = []
        self.aside: list[Sequence[Proposal]] = []
        self.runners_up: list[Sequence[int]] = []
        self._k = k

    @property
    def full(self) -> bool:
        return len(self.tokens) == self._k

    @property
    def others(self) -> list[list[int]]:
        """At each place, the tokens that were proposed and not taken, the most promising first, then the
        runners-up."""
        found = []
        for proposals, token, runners_up in zip(self.steps, self.tokens, self.runners_up, strict=True):
            ordered = [p.token for p in sorted(proposals, key=lambda proposal: -proposal.expected)]
            ordered += runners_up
            found.append([other for other in dict.fromkeys(ordered) if other not in (token, NOT_DRAWN)])
        return found

    def add(
        self,
        proposals: list[Proposal],
        settle: Callable[[Proposal], Proposal] | None = None,
        aside: Sequence[Proposal] = (),
        runners_up: Sequence[int] = (),
    ) -> int | None:
        """Take the best of what was proposed; the token, or None if the draft ends here.

        `settle`: what becomes of the one that is taken; its token may have to be drawn. `aside`: not for
        choice, but judged as well. `runners_up`: tokens that nobody proposes, but that are next likely.
        """
        chosen = best(proposals)
        if chosen is None or self.reach * chosen.expected < LEAST_REACH:
            return None
        if settle is not None:
            taken = settle(chosen)
            proposals = [taken if proposal is chosen else proposal for proposal in proposals]
            chosen = taken
        self.reach *= chosen.expected
        self.steps.append(proposals)
        self.aside.append(aside)
        self.runners_up.append(runners_up)
        self.tokens.append(chosen.token)
        self.expected.append(chosen.expected)
        return chosen.token


class Judge:
    """Remembers the last draft of each sequence until the target's own tokens are there to compare."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._drafts: dict[int, tuple[int, Draft]] = {}

    def remember(self, sequence: LaneSequence, draft: Draft) -> None:
        self._drafts[sequence.seq] = len(sequence.tokens), draft

    def learn(self, sequence: LaneSequence) -> None:
        """Every proposal is judged that was made after what the target then said itself."""
        start, draft = self._drafts.get(sequence.seq, (0, None))
        if draft is None or len(sequence.tokens) <= start:
            return
        del self._drafts[sequence.seq]
        for proposals, aside, drafted, token in zip(
            draft.steps, draft.aside, draft.tokens, sequence.tokens[start:], strict=False
        ):
            for proposal in (*proposals, *aside):
                if proposal.token != NOT_DRAWN:
                    self._calibration.note(proposal.kind, proposal.token == token)
            if drafted != token:
                break

    def adopt(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        """The draft of a branch is the sequence's now, whose own was judged by that."""
        self.learn(sequence)
        if branch.seq in self._drafts:
            self._drafts[sequence.seq] = self._drafts.pop(branch.seq)

    def forget(self, sequence: LaneSequence) -> None:
        self._drafts.pop(sequence.seq, None)
