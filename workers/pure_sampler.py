"""How a token is drawn from a row of logits, in pure Python: the definition, and for engines without torch.

`workers.sampler` follows the same rule on tensors. It must not import torch; it knows no model or wire.

The rule: mask stop tokens while the text is too short. Greedy takes the best logit. Otherwise keep the best
tokens as top_k, then top_p, then min_p ask of logit / temperature, and take the maximum of that quotient plus
Gumbel noise keyed by (seed, position, token id). "Best" is the order by logit, then by lowest id, so each
filter keeps a prefix of one order and the result never hangs on how a sort happens to arrange ties.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from workers import noise
from workers.distribution import PureDistribution
from workers.engines.engine import Sample, Score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import SamplingSpec
    from workers.engines.engine import Draw

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: quotients leave float32's range, and only the best token counts."""

SLACK = 1e-5
"""A mass this little below top_p counts as reached, and a logit this little below min_p's bound as above it:
what is equal on paper, such as top_p = 0.5 over two equal tokens, must not turn on the rounding of a sum."""

NO_TOKEN = "no token can be sampled: the logits have NaN or +inf, or leave no token with a finite one"


def forbidden_tokens(draw: Draw, vocabulary_size: int) -> list[int]:
    """Ids that this draw must not yield: the stop tokens, while fewer than min_tokens have been generated.

    A draw with an edit has that in it.
    """
    if draw.generated >= draw.sampling.min_tokens:
        return []
    return [token for token in draw.sampling.stop_token_ids if 0 <= token < vocabulary_size]


def sample_row(logits: Sequence[float], draw: Draw) -> Sample:
    """One sample of a row [V]. Raises FloatingPointError on NaN, on +inf, and if masks leave no token."""
    allowed, best = _sound(logits, draw)
    token = allowed.index(best)
    if draw.sampling.temperature >= GREEDY_BELOW:
        tokens = sorted(kept_tokens(allowed, best, draw.sampling))
        token = noisy_best(tokens, [allowed[token] for token in tokens], best, draw)
    if draw.sampling.logprobs is None:
        return Sample(token)
    return _with_logprobs(logits, token, draw.sampling.logprobs)


def distribution(logits: Sequence[float], draw: Draw) -> PureDistribution:
    """What `sample_row` samples a row [V] from, at a temperature that is not greedy. Raises as it does."""
    allowed, best = _sound(logits, draw)
    tokens = kept_tokens(allowed, best, draw.sampling)
    weights = [math.exp((allowed[token] - best) / draw.sampling.temperature) for token in tokens]
    return PureDistribution(tokens, weights, len(logits))


def score(logits: Sequence[float], token: int, alternatives: int) -> Score:
    """What a row [V] says of a token: see Score. Tokens as probable as it are not above it."""
    said = _with_logprobs(logits, token, alternatives)
    assert said.logprob is not None, "it was asked for"
    return Score(said.logprob, said.top, 1 + sum(logit > logits[token] for logit in logits))


def _sound(logits: Sequence[float], draw: Draw) -> tuple[list[float], float]:
    """The edited row and its largest logit. Raises FloatingPointError if there is nothing to sample."""
    allowed = _edited(logits, draw)
    best = max(allowed)
    if not math.isfinite(best) or math.inf in logits or any(map(math.isnan, logits)):
        raise FloatingPointError(NO_TOKEN)
    return allowed, best


def _edited(logits: Sequence[float], draw: Draw) -> list[float]:
    if draw.edit is not None:
        import numpy as np  # a toy starts in milliseconds because it needs this rarely

        return list(map(float, draw.edit.applied(np.asarray(logits, np.float32))))
    allowed = list(logits)
    for token in forbidden_tokens(draw, len(allowed)):
        allowed[token] = -math.inf
    return allowed


def kept_tokens(logits: Sequence[float], best: float, sampling: SamplingSpec) -> list[int]:
    """Ids that top_k, top_p and min_p leave, best first; `best` is the largest logit, whose token stays."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    scaled = [(logits[token] - best) / sampling.temperature for token in order]
    keep = min(sampling.top_k or len(order), len(order))
    if sampling.top_p < 1.0:
        weights = [math.exp(value) for value in scaled[:keep]]
        keep = _prefix_with_mass(weights, sampling.top_p)
    if sampling.min_p > 0.0:
        bound = math.log(sampling.min_p) - SLACK
        keep = sum(value >= bound for value in scaled[:keep])
    return order[:keep]


def _prefix_with_mass(weights: Sequence[float], share: float) -> int:
    """Length of the shortest prefix with at least `share`, less SLACK, of the sum of descending `weights`."""
    wanted = (share - SLACK) * math.fsum(weights)
    mass = 0.0
    for index, weight in enumerate(weights):
        mass += weight
        if mass >= wanted:
            return index + 1
    return len(weights)


def noisy_score(token: int, logit: float, best: float, key: noise.Key, draw: Draw) -> float:
    """Gumbel-max score (logit - best) / temperature + noise; any other `best` gives the same order."""
    return (logit - best) / draw.sampling.temperature + noise.gumbel(key, token)


def noisy_best(tokens: Sequence[int], logits: Sequence[float], best: float, draw: Draw) -> int:
    """The token with the largest noisy score, the lowest of tied ones; `logits[i]` is that of `tokens[i]`."""
    key = noise.key(draw.sampling.seed, draw.position, noise.TARGET)
    pairs = zip(tokens, logits, strict=True)
    return -max((noisy_score(token, logit, best, key, draw), -token) for token, logit in pairs)[1]


def ranked_tokens(logits: Sequence[tuple[int, float]], draw: Draw) -> list[int]:
    """Tokens, the likeliest first, to be the draw's sample. `logits`: (token, finite logit), best first; all
    of a row, or its best ones if that is near enough."""
    if draw.sampling.temperature < GREEDY_BELOW:
        return [token for token, _ in logits]
    values = [logit for _, logit in logits]
    key = noise.key(draw.sampling.seed, draw.position, noise.TARGET)
    scores = []
    for index in kept_tokens(values, values[0], draw.sampling) if values else []:
        token, logit = logits[index]
        scores.append((-noisy_score(token, logit, values[0], key, draw), token))
    return [token for _, token in sorted(scores)]


def ranked_row(logits: Sequence[float], draw: Draw, count: int) -> list[int]:
    """Up to `count` tokens of a row [V], the likeliest first, to be the draw's sample."""
    allowed = _edited(logits, draw)
    best = sorted(((t, v) for t, v in enumerate(allowed) if math.isfinite(v)), key=lambda pair: -pair[1])
    return ranked_tokens(best, draw)[:count]


def _with_logprobs(logits: Sequence[float], token: int, alternatives: int) -> Sample:
    """Log-probabilities under the model itself: before temperature, masks and filters."""
    best = max(logits)
    total = best + math.log(math.fsum(math.exp(logit - best) for logit in logits))
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[:alternatives]
    return Sample(token, logits[token] - total, tuple((i, logits[i] - total) for i in order))
