"""A small causal LM as speculator. It samples with the target's own noise, so it guesses the target's sample,
not merely a likely token: coupled acceptance works at any temperature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workers.engines.engine import Draw, Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import Vocabulary
    from workers.engines.engine import Engine
    from workers.sequence import LaneSequence
    from workers.speculator import Ask


class DraftSpeculator:
    def __init__(self, engine: Engine[Any]) -> None:
        self._engine = engine

    @property
    def vocabulary(self) -> Vocabulary:
        return self._engine.vocabulary

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def notes(self) -> list[str]:
        return self._engine.notes

    def warm_up(self) -> None:
        self._engine.warm_up()

    def open(self, sequence: LaneSequence) -> None:
        self._engine.open(sequence.seq)

    def close(self, sequence: LaneSequence) -> None:
        self._engine.close(sequence.seq)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        """One token a pass, all sequences in one batch; a sequence leaves it when it has its k tokens.

        A sequence with k = 0 is only run up to date.
        """
        behind = [_window(ask.sequence, (), rows=0) for ask in asks if ask.k == 0]
        if behind := [window for window in behind if window.tokens]:
            self._engine.forward(behind)
        proposals: list[list[int]] = [[] for _ in asks]
        for step in range(max((ask.k for ask in asks), default=0)):
            active = [(ask, tokens) for ask, tokens in zip(asks, proposals, strict=True) if ask.k > step]
            windows = [_window(ask.sequence, tokens) for ask, tokens in active]
            draws = [_draw(ask.sequence, len(tokens)) for ask, tokens in active]
            samples = self._engine.sample(self._engine.forward(windows), draws)
            for (_, tokens), sample in zip(active, samples, strict=True):
                tokens.append(sample.token)
        return proposals


def _window(sequence: LaneSequence, tokens: Sequence[int], rows: int = 1) -> Window:
    start, run = sequence.window(tokens, rows)
    return Window(sequence.seq, start, run, rows)


def _draw(sequence: LaneSequence, drafted: int) -> Draw:
    position = len(sequence.tokens) + drafted
    return Draw(sequence.sampling, position, position - sequence.prompt_len)
