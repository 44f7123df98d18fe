"""A small causal LM as speculator. It samples with the target's own noise, so it guesses the target's sample,
not merely a likely token: coupled acceptance works at any temperature. Where guesses are to be drawn, it
draws them from its own distribution, and says which that was."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from workers.outcomes import ALTERNATIVES
from workers.q_row import Q
from workers.speculator import never

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.engines.engine import Draw, Engine, Served
    from workers.sequence import LaneSequence
    from workers.speculator import Ask, News

log = logging.getLogger("speclane")


class DraftSpeculator:
    """A sequence whose logits are no numbers gets no drafts; the others are not affected."""

    prefers_fresh = False

    def __init__(self, engine: Engine[Any]) -> None:
        self.served: Served = engine
        self._engine = engine

    def open(self, sequence: LaneSequence) -> None:
        sequence.hold(self._engine.open(sequence.seq, sequence.tokens))

    def close(self, sequence: LaneSequence) -> None:
        self._engine.close(sequence.seq)

    def fork(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._engine.fork(sequence.seq, branch.seq)

    def adopt(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._engine.replace(sequence.seq, branch.seq)
        sequence.adopt(branch)

    def room(self, length: int) -> int:
        return self._engine.room(length)

    def observe(self, news: Sequence[News]) -> None:
        """Sees tokens only when it is asked what follows them."""

    def propose(self, asks: Sequence[Ask], cancelled: Callable[[], bool] = never) -> list[list[int] | None]:
        """One token a pass, all sequences in one batch; a sequence leaves it when it has its k tokens.

        A sequence with k = 0 is only run up to date.
        """
        behind = [ask.sequence.window((), rows=0) for ask in asks if ask.k == 0]
        if behind := [window for window in behind if window.tokens]:
            self._engine.forward(behind)
        proposals: dict[int, list[int]] = {ask.sequence.seq: [] for ask in asks}
        for step in range(max((ask.k for ask in asks), default=0)):
            if step and cancelled():
                break
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
            if any(ask.drawn_from is not None for ask, _ in active):
                guesses = self._drawn(rows, active, draws)
            else:
                guesses = self._sampled(rows, active, draws)
        except FloatingPointError as error:
            if len(active) > 1:
                return [self._guesses([one])[0] for one in active]
            log.warning("sequence %d: %s", active[0][0].sequence.seq, error)
            return [None]
        if any(ask.others is not None for ask, _ in active):
            ranks = self._engine.ranked(rows, draws, ALTERNATIVES + 1)
            for (ask, _), guess, ranked in zip(active, guesses, ranks, strict=True):
                if ask.others is not None:
                    ask.others.append([token for token in ranked if token != guess][:ALTERNATIVES])
        return guesses

    def _sampled(
        self, rows: Any, active: Sequence[tuple[Ask, list[int]]], draws: Sequence[Draw]
    ) -> list[int]:
        guesses = [sample.token for sample in self._engine.sample(rows, draws)]
        if any(ask.confidences is not None for ask, _ in active):
            for (ask, _), chance in zip(active, self._engine.confidences(rows, guesses), strict=True):
                if ask.confidences is not None:
                    ask.confidences.append(chance)
        return guesses

    def _drawn(self, rows: Any, active: Sequence[tuple[Ask, list[int]]], draws: Sequence[Draw]) -> list[int]:
        """The same where guesses of some are drawn. Nothing is drawn for any if one has no numbers."""
        engine = self._engine
        sources: list[Q | int] = []
        for index, ((ask, _), how) in enumerate(zip(active, draws, strict=True)):
            if ask.drawn_from is not None:
                sources.append(ask.drawn_from.q(engine.distribution(rows, index, how)))
            else:
                sources.append(engine.sample(rows[index : index + 1], [how])[0].token)
        guesses = []
        for index, ((ask, tokens), source) in enumerate(zip(active, sources, strict=True)):
            if isinstance(source, Q):
                assert ask.drawn_from is not None, "it made the row"
                guesses.append(ask.drawn_from.draw(source, ask.sequence, len(tokens)))
            else:
                guesses.append(source)
            if ask.confidences is None:
                continue
            if isinstance(source, Q):
                ask.confidences.append(source.best)  # not that of the token, which would favour likely ones
            else:
                ask.confidences.extend(engine.confidences(rows[index : index + 1], [source]))
        return guesses
