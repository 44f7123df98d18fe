"""What a head would be worth: rounds of greedy drafting replayed on text that the target wrote greedily."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from collections.abc import Iterator

    from head import Head
    from teacher import Lessons
    from torch import Tensor


class Score(NamedTuple):
    """`length`: mean tokens per round, the target's own included. `by_position`: share of rounds in which the
    draft's token at the position, and all before it, stood."""

    length: float
    by_position: list[float]


@torch.inference_mode()
def simulate(
    head: Head, output: Tensor, embedding: Tensor, draft_to_target: Tensor, lessons: Lessons, k: int
) -> Score:
    """`output` [drafted vocabulary, hidden]: rows of the output layer for the tokens of `draft_to_target`."""
    accepted = []
    for tokens, features in zip(lessons.tokens.long(), lessons.features, strict=True):
        drafts = draft(head, output, embedding, draft_to_target, tokens[None], features[None].float(), k)
        accepted.append(_accepted(drafts[0], tokens))
    return score(lessons.written, torch.stack(accepted), k)


def draft(
    head: Head,
    output: Tensor,
    embedding: Tensor,
    draft_to_target: Tensor,
    tokens: Tensor,
    features: Tensor,
    k: int,
) -> Tensor:
    """What would be drafted after every index, [n, length, k]; entry 0 guesses the token at index + 2."""
    current = F.pad(tokens[:, 1:], (0, 1))

    def inputs() -> Iterator[Tensor]:
        for _ in range(k):
            yield embedding[current].float()

    guesses = []
    for rows in head.steps(features, inputs()):
        current = draft_to_target[(rows @ output.T).argmax(dim=-1)]
        guesses.append(current)
    return torch.stack(guesses, dim=-1)


def _accepted(drafts: Tensor, tokens: Tensor) -> Tensor:
    """How many leading guesses after each index are the text's own: int64 [length]."""
    length, k = drafts.shape
    actual = torch.stack(
        [F.pad(tokens[2 + step :], (0, 2 + step), value=-1)[:length] for step in range(k)], dim=1
    )
    return (drafts == actual).long().cumprod(dim=1).sum(dim=1)


def score(written: Tensor, accepted: Tensor, k: int) -> Score:
    """Rounds over the written runs of each row. accepted [n, length]: see `_accepted`."""
    counts = [0] * (k + 1)
    for flags, row in zip(written.tolist(), accepted.tolist(), strict=True):
        at, length = 2, len(flags)
        while at < length:
            if not flags[at]:
                at += 1
                continue
            end = at
            while end < length and end - at < k and flags[end]:
                end += 1
            if end == length:
                break  # what would have been accepted beyond the end is not known
            stood = min(row[at - 2], end - at)
            counts[stood] += 1
            at += stood + 1
    rounds = sum(counts) or 1
    tokens = sum((stood + 1) * count for stood, count in enumerate(counts))
    return Score(tokens / rounds, [sum(counts[position + 1 :]) / rounds for position in range(k)])
