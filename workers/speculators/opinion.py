"""What a head makes of the next token: its guess, by how much that leads, and what else it thinks likely.

The head guesses with the noise that the target will sample with. Noise that lifts a token far above the
others does so for any logits that are roughly alike. So the lead says more than the guess's own probability.
"""

from __future__ import annotations

import math
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

import torch

from workers import noise
from workers.outcomes import ALTERNATIVES
from workers.pure_sampler import GREEDY_BELOW
from workers.speculators.lookup import Kind

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor

    from workers.engines.engine import Draw
    from workers.speculators.proposals import Proposal

CONSIDERED = 24
"""So many of the likeliest tokens can be the runner-up, or be told from what is unlikely."""
_LEADS = 8
"""Leads are told apart by half a nat, up to so many of those."""
_DECADES = 4
"""Shares are told apart by their power of ten, down to so many."""


class HeadGuess(NamedTuple):
    """Kind of a head's guess: how many steps of its own it is away from the target's rows, its lead in half
    nats, whether lookups say anything there, how the target samples."""

    step: int
    lead: int
    beside_lookups: bool
    greedy: bool


class Seconded(NamedTuple):
    """Kind of a lookup's guess of which a head has an opinion, too: the source, how often such guesses are
    right anyway in tenths, whether the head guesses the same, else how unlikely it thinks that."""

    source: str
    tenths: int
    agreed: bool
    decades: int
    greedy: bool


class Opinion(NamedTuple):
    """`lead` over the runner-up in nats, noise included. `others`: the runner-up and those after it, up to
    ALTERNATIVES. `shares` of the likeliest tokens at the temperature, before noise and filters."""

    token: int
    lead: float
    others: list[int]
    shares: dict[int, float]
    greedy: bool

    def kind(self, step: int, *, beside_lookups: bool) -> HeadGuess:
        """`step`: so many steps the head has gone on from rows of its own."""
        return HeadGuess(min(2, step), min(_LEADS - 1, int(2 * self.lead)), beside_lookups, self.greedy)

    def of(self, guess: Proposal) -> Seconded:
        """What kind of guess a lookup's is, this being the head's opinion."""
        assert isinstance(guess.kind, Kind), "a guess that is not a lookup's"
        share = self.shares.get(guess.token, 0.0)
        decades = int(-math.log10(share)) if share > 10.0**-_DECADES else _DECADES
        tenths = min(9, int(10 * guess.expected))
        return Seconded(guess.kind.source, tenths, guess.token == self.token, decades, self.greedy)


def opinion(logits: Tensor, tokens: Tensor, guess: int, draw: Draw) -> Opinion:
    """`guess` is what was sampled from `logits` [n] of `tokens` [n] by `draw`."""
    temperature = draw.sampling.temperature
    greedy = temperature < GREEDY_BELOW
    likeliest = torch.softmax(logits if greedy else logits / temperature, dim=0).topk(
        min(CONSIDERED, len(logits))
    )
    shares = dict(zip(tokens[likeliest.indices].tolist(), likeliest.values.tolist(), strict=True))
    scores = {token: math.log(share) for token, share in shares.items() if share > 0.0}
    if not greedy:
        key = noise.key(draw.sampling.seed, draw.position, noise.TARGET)
        scores = {token: score + noise.gumbel(key, token) for token, score in scores.items()}
    won = scores.pop(guess, -math.inf)  # so unlikely that its noise must have been enormous, or else filtered
    others = nlargest(ALTERNATIVES, scores, key=scores.__getitem__)
    lead = won - max(scores.values(), default=-math.inf)
    lead = max(0.0, min(lead, float(_LEADS))) if won > -math.inf else 0.0
    return Opinion(guess, lead, others, shares, greedy)


_SECONDED_BIAS = {"own": 0.7, "shared": 0.2, "prior": -0.3}


def first_estimate(kind: Hashable) -> float:
    """The share of right guesses, until there are better figures; see workers.speculators.lookup."""
    if isinstance(kind, Seconded):
        logit = _SECONDED_BIAS[kind.source] + math.log((kind.tenths + 0.5) / (9.5 - kind.tenths))
        logit += 1.5 if kind.agreed else -0.34 * kind.decades
    else:
        assert isinstance(kind, HeadGuess)
        per_lead = 0.47 if kind.greedy else 0.32
        logit = (-1.55, -1.75, -2.1)[kind.step] + per_lead * kind.lead + 0.22 * kind.beside_lookups
    return 1 / (1 + math.exp(-logit))
