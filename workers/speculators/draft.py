"""A small causal LM as speculator. It samples with the target's own noise, so it guesses the target's sample,
not merely a likely token: coupled acceptance works at any temperature."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.engines.engine import Engine, Served
    from workers.sequence import LaneSequence
    from workers.speculator import Ask

log = logging.getLogger("speclane")


class DraftSpeculator:
    """A sequence whose logits are no numbers gets no drafts; the others are not affected."""

    def __init__(self, engine: Engine[Any]) -> None:
        self.served: Served = engine
        self._engine = engine

    def open(self, sequence: LaneSequence) -> None:
        sequence.hold(self._engine.open(sequence.seq, sequence.tokens))

    def close(self, sequence: LaneSequence) -> None:
        self._engine.close(sequence.seq)

    def propose(self, asks: Sequence[Ask]) -> list[list[int] | None]:
        """One token a pass, all sequences in one batch; a sequence leaves it when it has its k tokens.

        A sequence with k = 0 is only run up to date.
        """
        behind = [ask.sequence.window((), rows=0) for ask in asks if ask.k == 0]
        if behind := [window for window in behind if window.tokens]:
            self._engine.forward(behind)
        proposals: dict[int, list[int]] = {ask.sequence.seq: [] for ask in asks}
        for step in range(max((ask.k for ask in asks), default=0)):
            asked = [ask for ask in asks if ask.k > step and ask.sequence.seq in proposals]
            active = [(ask, proposals[ask.sequence.seq]) for ask in asked]
            for (ask, tokens), guess in zip(active, self._guesses(active), strict=True):
                if guess is None:
                    del proposals[ask.sequence.seq]
                else:
                    tokens.append(guess)
        return [proposals.get(ask.sequence.seq) for ask in asks]

    def _guesses(self, active: Sequence[tuple[Ask, list[int]]]) -> Sequence[int | None]:
        """The next token of each; None for those that have none, who are found by running each alone."""
        windows = [ask.sequence.window(tokens, rows=1) for ask, tokens in active]
        draws = [ask.sequence.draws(tokens, rows=1)[0] for ask, tokens in active]
        try:
            rows = self._engine.forward(windows)
            guesses = [sample.token for sample in self._engine.sample(rows, draws)]
        except FloatingPointError as error:
            if len(active) > 1:
                return [self._guesses([one])[0] for one in active]
            log.warning("sequence %d: %s", active[0][0].sequence.seq, error)
            return [None]
        if any(ask.confidences is not None for ask, _ in active):
            for (ask, _), chance in zip(active, self._engine.confidences(rows, guesses), strict=True):
                if ask.confidences is not None:
                    ask.confidences.append(chance)
        return guesses
