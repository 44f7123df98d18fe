"""A small causal LM as speculator. It samples with the target's own noise, so it guesses the target's sample,
not merely a likely token: coupled acceptance works at any temperature."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from workers.engines.engine import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.engines.engine import Engine, Sample, Served
    from workers.sequence import LaneSequence
    from workers.speculator import Ask

log = logging.getLogger("speclane")


class DraftSpeculator:
    """A sequence whose logits are no numbers gets no drafts; the others are not affected."""

    def __init__(self, engine: Engine[Any]) -> None:
        self.served: Served = engine
        self._engine = engine

    def open(self, sequence: LaneSequence) -> None:
        self._engine.open(sequence.seq)

    def close(self, sequence: LaneSequence) -> None:
        self._engine.close(sequence.seq)

    def propose(self, asks: Sequence[Ask]) -> list[list[int] | None]:
        """One token a pass, all sequences in one batch; a sequence leaves it when it has its k tokens.

        A sequence with k = 0 is only run up to date.
        """
        behind = [_window(ask.sequence, (), rows=0) for ask in asks if ask.k == 0]
        if behind := [window for window in behind if window.tokens]:
            self._engine.forward(behind)
        proposals: dict[int, list[int]] = {ask.sequence.seq: [] for ask in asks}
        for step in range(max((ask.k for ask in asks), default=0)):
            asked = [ask for ask in asks if ask.k > step and ask.sequence.seq in proposals]
            active = [(ask.sequence, proposals[ask.sequence.seq]) for ask in asked]
            for (sequence, tokens), sample in zip(active, self._samples(active), strict=True):
                if sample is None:
                    del proposals[sequence.seq]
                else:
                    tokens.append(sample.token)
        return [proposals.get(ask.sequence.seq) for ask in asks]

    def _samples(self, active: Sequence[tuple[LaneSequence, list[int]]]) -> Sequence[Sample | None]:
        """The next token of each; None for those that have none, who are found by running each alone."""
        windows = [_window(sequence, tokens) for sequence, tokens in active]
        draws = [sequence.draws(tokens, rows=1)[0] for sequence, tokens in active]
        try:
            return self._engine.sample(self._engine.forward(windows), draws)
        except FloatingPointError as error:
            if len(active) > 1:
                return [self._samples([one])[0] for one in active]
            log.warning("sequence %d: %s", active[0][0].seq, error)
            return [None]


def _window(sequence: LaneSequence, tokens: Sequence[int], rows: int = 1) -> Window:
    start, run = sequence.window(tokens, rows)
    return Window(sequence.seq, start, run, rows)
