"""Prompt lookup: guess that what followed the last few tokens before will follow them again. No model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.speculator import never
from workers.speculators.modelless import ModellessSpeculator

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ipc.messages import LaneSpec
    from workers.sequence import LaneSequence
    from workers.speculator import Ask

MIN_MATCH = 2
MAX_MATCH = 4
_INDEX_BYTES = 600
"""Of the index per token, about: three keys with their entries."""


class NgramSpeculator(ModellessSpeculator):
    def __init__(self, spec: LaneSpec) -> None:
        super().__init__(spec, _INDEX_BYTES)
        self._indexes: dict[int, NgramIndex] = {}

    def open(self, sequence: LaneSequence) -> None:
        self._indexes[sequence.seq] = NgramIndex()

    def close(self, sequence: LaneSequence) -> None:
        del self._indexes[sequence.seq]

    def fork(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._indexes[branch.seq] = self._indexes[sequence.seq]

    def adopt(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self.close(branch)

    def propose(self, asks: Sequence[Ask], cancelled: Callable[[], bool] = never) -> list[list[int]]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> list[int]:
        sequence = ask.sequence
        return self._indexes[sequence.seq].propose(sequence.tokens, ask.k, sequence.committed)


class NgramIndex:
    """Where each run of MIN_MATCH … MAX_MATCH tokens of a sequence last ended, its own end excluded."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def propose(self, tokens: Sequence[int], k: int, committed: int | None = None) -> list[int]:
        """Up to k tokens that followed the longest match; a match near the end goes on into its own guesses.

        The first `committed` tokens (None: all) are, so from call to call those only grow.
        """
        committed = len(tokens) if committed is None else committed
        for end in range(max(self._indexed, MIN_MATCH), committed):
            for length in range(MIN_MATCH, min(MAX_MATCH, end) + 1):
                self._ends[tuple(tokens[end - length : end])] = end
        self._indexed = max(self._indexed, committed)
        for length in range(min(MAX_MATCH, len(tokens)), MIN_MATCH - 1, -1):
            match = self._ends.get(tuple(tokens[len(tokens) - length :]))
            if match is not None:
                period = len(tokens) - match
                guess: list[int] = []
                for i in range(k):
                    guess.append(tokens[match + i] if i < period else guess[i - period])
                return guess
        return []
