"""What is likely next because it was so before: in this sequence, in earlier ones, in what the target writes.

Three sources guess; the one whose guess is more likely right, by what such guesses were worth so far, is
taken.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from workers.pure_sampler import GREEDY_BELOW
from workers.speculators.history import CONTEXTS, SEPARATOR, History
from workers.speculators.proposals import Proposal

if TYPE_CHECKING:
    from collections.abc import Hashable

    from workers.sequence import LaneSequence
    from workers.speculators.calibration import Calibration
    from workers.speculators.history import Guess, Walk
    from workers.speculators.prior import Prior, PriorWalk

SHARED_TOKENS = 1 << 18
"""What is remembered of all sequences together; about 9 MiB."""


class Kind(NamedTuple):
    """What is known of a guess beforehand; see Guess."""

    source: str
    length: int
    votes: int
    agreed: int
    greedy: bool


class Lookup:
    """Sequences by number, and what they share. `calibration` says how good the sources are."""

    def __init__(self, max_model_len: int, prior: Prior | None, calibration: Calibration) -> None:
        self._max_model_len = max_model_len
        self._calibration = calibration
        self._prior = prior
        self._own: dict[int, History] = {}
        self._shared = History(SHARED_TOKENS)

    @property
    def nbytes(self) -> int:
        """Memory of what is remembered beyond open sequences; it does not grow."""
        return self._shared.nbytes

    def open(self, sequence: LaneSequence) -> None:
        self._own[sequence.seq] = History(self._max_model_len)

    def fork(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._own[branch.seq] = self._own[sequence.seq]

    def close(self, sequence: LaneSequence) -> None:
        """What the target said is remembered for other sequences; what a branch assumes, it did not say."""
        del self._own[sequence.seq]
        if sequence.committed < len(sequence.tokens):
            return
        said = sequence.tokens[max(0, sequence.prompt_len - CONTEXTS[0]) :]
        if len(sequence.tokens) > sequence.prompt_len:
            self._shared.extend([*said, SEPARATOR])

    def path(self, sequence: LaneSequence) -> Path:
        """Guesses from the end of a sequence on."""
        own = self._own[sequence.seq]
        own.extend(sequence.tokens[own.told : sequence.committed])
        context = sequence.tokens
        walks: dict[str, Walk | PriorWalk] = {"own": own.walk(context), "shared": self._shared.walk(context)}
        if self._prior is not None:
            walks["prior"] = self._prior.walk(context)
        greedy = sequence.sampling.temperature < GREEDY_BELOW
        return Path(walks, self._calibration, greedy)


class Path:
    def __init__(self, walks: dict[str, Walk | PriorWalk], calibration: Calibration, greedy: bool) -> None:
        self._walks = walks
        self._greedy = greedy
        self._calibration = calibration

    def proposals(self) -> list[Proposal]:
        """What each source says is next, of those that say anything."""
        proposals = []
        for source, walk in self._walks.items():
            if (guess := walk.guess()) is not None:
                kind = _kind(source, guess, self._greedy)
                proposals.append(Proposal(guess.token, self._calibration.expected(kind), kind))
        return proposals

    def go(self, token: int) -> None:
        for walk in self._walks.values():
            walk.go(token)


def _kind(source: str, guess: Guess, greedy: bool) -> Kind:
    agreed = 8 * guess.votes // guess.places
    return Kind(source, min(guess.length, 8), min(guess.votes, 3), agreed, greedy)


_BIAS = {"own": -3.4, "shared": -4.1, "prior": -2.6}
_PER_LENGTH = {"own": 0.31, "shared": 0.31, "prior": 0.45}
_PER_AGREED = {"own": 0.32, "shared": 0.32, "prior": 0.13}


def first_estimate(kind: Hashable) -> float:
    """The share of right guesses, until there are better figures: a logistic fit to those in answers of
    SmolLM2 to 80 questions, half of them greedy."""
    assert isinstance(kind, Kind)
    per_agreed = _PER_AGREED[kind.source] + 0.08 * kind.greedy
    logit = _BIAS[kind.source] + _PER_LENGTH[kind.source] * kind.length + per_agreed * kind.agreed
    return 1 / (1 + math.exp(-logit - 0.09 * kind.votes))
