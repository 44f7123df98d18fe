"""Log-probabilities of the tokens of a prompt, which the target reports while it runs the prompt.

What is run for them is run like any other part of a prompt, only that each token yields a row. Rows come a
few at a time, so that a long prompt takes no more memory than a verification, which is what was planned for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ipc.messages import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.engines.engine import Engine, Window
    from workers.sequence import LaneSequence

ROWS = 16
"""Rows at a time."""


class Scores(NamedTuple):
    """`ran`: so many tokens of the prompt were run for the entries."""

    entries: list[TokenLogprobs]
    ran: int


def score_prompt(
    sequence: LaneSequence,
    since: int,
    room: int,
    engine: Engine[Any],
    forward: Callable[[Sequence[Window]], Any],
) -> Scores:
    """Runs up to `room` tokens that the engine has not seen, all but the prompt's last.

    The entries are of the tokens that these predict, without those at positions below `since`.
    """
    alternatives = sequence.sampling.prompt_logprobs or 0
    entries: list[TokenLogprobs] = []
    ran = 0
    while ran < room:
        window = sequence.stretch(sequence.prompt_len - 1, min(ROWS, room - ran))
        if not window.tokens:
            break
        ran += len(window.tokens)
        rows = forward([window])
        first, end = window.start + 1, window.start + 1 + len(window.tokens)
        scores = engine.scores(rows, sequence.tokens[first:end], alternatives)
        entries += [
            TokenLogprobs(score.logprob, list(score.top), score.rank)
            for position, score in enumerate(scores, first)
            if position >= since
        ]
    return Scores(entries, ran)
