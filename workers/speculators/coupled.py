"""What the target's noise says of a guess before the target is asked. Pure.

The target takes the token with the largest log-probability plus Gumbel noise, and the noise is known here.
The largest of all other tokens is then Gumbel, too, shifted by the log of their mass (the maximum of Gumbel
variables, as in arXiv 1411.0030). So if a token has probability p and noise g, it is taken with probability
exp(-(1 - p) / p · exp(-g)): a guess is much more or much less likely right than its probability alone says.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workers import noise
from workers.pure_sampler import GREEDY_BELOW

if TYPE_CHECKING:
    from ipc.messages import SamplingSpec


def given_noise(probability: float, token: int, sampling: SamplingSpec, position: int) -> float:
    """How probable it is that the target samples `token` at `position`, of which it makes up `probability`
    (above 0) after temperature. Greedy has no noise: there it is the probability itself."""
    if sampling.temperature < GREEDY_BELOW:
        return probability
    gumbel = noise.gumbel(noise.key(sampling.seed, position, noise.TARGET), token)
    return math.exp(-(1 - probability) / probability * math.exp(-gumbel))
