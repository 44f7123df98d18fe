"""The `suffix` speculator: drafts from what was said before, at microseconds per token. No model."""

from __future__ import annotations

from pathlib import Path as FilePath
from typing import TYPE_CHECKING

from workers.speculator import never
from workers.speculators.calibration import Calibration
from workers.speculators.history import TOKEN_BYTES
from workers.speculators.lookup import Lookup, first_estimate
from workers.speculators.modelless import ModellessSpeculator
from workers.speculators.prior import Prior
from workers.speculators.proposals import Draft, Judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ipc.messages import LaneSpec
    from workers.sequence import LaneSequence
    from workers.speculator import Ask, News


class SuffixSpeculator(ModellessSpeculator):
    def __init__(self, spec: LaneSpec) -> None:
        super().__init__(spec, TOKEN_BYTES)
        prior = Prior(FilePath(spec.prior)) if spec.prior else None
        if prior is not None:
            self._notes.append(f"suffix: starts from {len(prior)} contexts of the target's own writing")
        calibration = Calibration(first_estimate)
        self._lookup = Lookup(spec.max_model_len, prior, calibration)
        self._judge = Judge(calibration)

    def open(self, sequence: LaneSequence) -> None:
        self._lookup.open(sequence)

    def close(self, sequence: LaneSequence) -> None:
        self._lookup.close(sequence)
        self._judge.forget(sequence)

    def fork(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._lookup.fork(sequence, branch)

    def adopt(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._judge.adopt(sequence, branch)
        self.close(branch)

    def observe(self, news: Sequence[News]) -> None:
        for sequence, _ in news:
            self._judge.learn(sequence)

    def propose(self, asks: Sequence[Ask], cancelled: Callable[[], bool] = never) -> list[list[int]]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> list[int]:
        sequence = ask.sequence
        path = self._lookup.path(sequence)
        draft = Draft(ask.k)
        while not draft.full and (token := draft.add(path.proposals())) is not None:
            path.go(token)
        self._judge.remember(sequence, draft)
        if ask.confidences is not None:
            ask.confidences.extend(draft.expected)
        if ask.others is not None:
            ask.others.extend(draft.others)
        return draft.tokens
