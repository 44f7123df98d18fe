"""A sequence's branches: what it would be after verdicts that have not been given yet, and a draft for each.

Owns their numbers and their end: of the branches of a sequence at most one comes true, and all others are
closed when the verdict is known. What a branch shares with its sequence is the speculator's business.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from workers.outcomes import Hypothesis, Outcomes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.sequence import LaneSequence
    from workers.speculator import Speculator

FIRST_BRANCH = 1 << 48
"""No sequence of a request has a number like that."""


class Trail(NamedTuple):
    """A draft that was made, and may be verified next. `others`: at each place, tokens that were held for
    less likely than the one drafted, the likeliest first."""

    base_len: int
    tokens: list[int]
    others: list[list[int]]

    def known(self, base_len: int, ahead: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """Of the draft `ahead`: the other tokens at each place, and those that may follow all of it."""
        place = len(ahead)
        if self.base_len != base_len or self.tokens[:place] != list(ahead):
            return [], []
        cut_off = place < len(self.tokens) and place < len(self.others)
        return self.others[:place], [self.tokens[place], *self.others[place]] if cut_off else []


NO_TRAIL = Trail(-1, [], [])


@dataclass(slots=True)
class Branch:
    """`assumed` follows what was committed when it was forked; `trail`: what was drafted after that."""

    assumed: list[int]
    sequence: LaneSequence
    trail: Trail = NO_TRAIL


@dataclass(slots=True)
class _Held:
    base_len: int = -1
    ahead: list[int] = field(default_factory=list)
    trail: Trail = NO_TRAIL
    branches: list[Branch] = field(default_factory=list)


class Branches:
    def __init__(self, speculator: Speculator) -> None:
        self._speculator = speculator
        self._outcomes = Outcomes()
        self._numbers = itertools.count(FIRST_BRANCH)
        self._of: dict[int, _Held] = {}

    def drafted(self, sequence: LaneSequence, trail: Trail) -> None:
        """What is verified next of a sequence, perhaps."""
        self._of.setdefault(sequence.seq, _Held()).trail = trail

    def begin(self, sequence: LaneSequence, ahead: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """The draft `ahead` is being verified; what is known of it: see Trail.known."""
        held = self._of.setdefault(sequence.seq, _Held())
        self._clear(held)
        held.base_len, held.ahead = len(sequence.tokens), list(ahead)
        return held.trail.known(held.base_len, ahead)

    def likeliest(
        self, ahead: Sequence[int], others: list[list[int]], after: Sequence[int], count: int
    ) -> list[Hypothesis]:
        return self._outcomes.likeliest(ahead, others, after, count)

    def fork(self, sequence: LaneSequence, assumed: list[int], source: LaneSequence | None = None) -> Branch:
        """A branch in which `assumed` follows. `source`: another that has got as far as all but the last of
        it."""
        number = next(self._numbers)
        if source is None:
            branch = Branch(assumed, sequence.branch(number, assumed))
        else:
            branch = Branch(assumed, source.branch(number, assumed[-1:]))
        self._speculator.fork(source or sequence, branch.sequence)
        self._of[sequence.seq].branches.append(branch)
        return branch

    def drop(self, sequence: LaneSequence, branch: Branch) -> None:
        """It has served its purpose."""
        self._of[sequence.seq].branches.remove(branch)
        self._speculator.close(branch.sequence)

    def settle(self, sequence: LaneSequence) -> None:
        """What is committed may have grown: learn from it, and keep of the branches the one that came
        true.
        """
        held = self._of.get(sequence.seq)
        if held is None or held.base_len < 0 or len(sequence.tokens) == held.base_len:
            return
        news = sequence.tokens[held.base_len :]
        if news[:-1] == held.ahead[: len(news) - 1]:
            others, _ = held.trail.known(held.base_len, held.ahead)
            self._outcomes.note(held.ahead, others, Hypothesis(len(news) - 1, news[-1]))
        held.trail = NO_TRAIL
        for branch in held.branches:
            if branch.assumed == news:
                held.branches.remove(branch)
                held.trail = branch.trail
                self._speculator.adopt(sequence, branch.sequence)
                break
        self._clear(held)

    def give_up(self) -> None:
        """Close all, of all sequences: what they take is needed for something else."""
        for held in self._of.values():
            self._drop_branches(held)

    def close(self, sequence: LaneSequence) -> None:
        if (held := self._of.pop(sequence.seq, None)) is not None:
            self._clear(held)

    def _clear(self, held: _Held) -> None:
        self._drop_branches(held)
        held.ahead, held.base_len = [], -1

    def _drop_branches(self, held: _Held) -> None:
        for branch in held.branches:
            self._speculator.close(branch.sequence)
        held.branches = []
