"""The `suffix` speculator: drafts from what was said before, at microseconds per token. No model."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from ipc.messages import Vocabulary
from workers.engines.weightless import Weightless
from workers.speculators.history import TOKEN_BYTES
from workers.speculators.lookup import Lookup
from workers.speculators.prior import Prior

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import LaneSpec
    from workers.sequence import LaneSequence
    from workers.speculator import Ask
    from workers.speculators.lookup import Proposal

LEAST_REACH = 0.02
"""A draft ends where the target gets to with a smaller probability: verifying a token is not quite free."""


class SuffixSpeculator(Weightless):
    def __init__(self, spec: LaneSpec) -> None:
        super().__init__(spec.max_sequences, spec.max_model_len, TOKEN_BYTES)
        self._max_model_len = spec.max_model_len
        prior = Prior(FilePath(spec.prior)) if spec.prior else None
        self._lookup = Lookup(spec.max_model_len, prior)
        self._drafts: dict[int, tuple[int, list[Proposal]]] = {}
        self._notes = (
            []
            if prior is None
            else [f"suffix: starts from {len(prior)} contexts of the target's own writing"]
        )

    @property
    def served(self) -> SuffixSpeculator:
        return self

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(size=0, fingerprint="")

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def notes(self) -> list[str]:
        return list(self._notes)

    def open(self, sequence: LaneSequence) -> None:
        self._lookup.open(sequence)

    def close(self, sequence: LaneSequence) -> None:
        self._lookup.close(sequence)
        self._drafts.pop(sequence.seq, None)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._propose(ask.sequence, ask.k) for ask in asks]

    def _propose(self, sequence: LaneSequence, k: int) -> list[int]:
        self._learn(sequence)
        path = self._lookup.path(sequence)
        draft: list[Proposal] = []
        reach = 1.0
        while len(draft) < k and (best := path.best()) is not None:
            reach *= best.expected
            if reach < LEAST_REACH:
                break
            draft.append(best)
            path.go(best.token)
        self._drafts[sequence.seq] = len(sequence.tokens), draft
        return [proposal.token for proposal in draft]

    def _learn(self, sequence: LaneSequence) -> None:
        """What became of the last draft: its guesses up to the first wrong one were judged."""
        start, draft = self._drafts.pop(sequence.seq, (0, []))
        for proposal, token in zip(draft, sequence.tokens[start:], strict=False):
            self._lookup.calibration.note(proposal.kind, proposal.token == token)
            if proposal.token != token:
                break
