"""Draws tokens from logit tensors by the rule of `workers.pure_sampler`, on any device.

The tensors only narrow a row down: float32 bounds leave the few tokens that can win, and the definition
decides between them in double precision. So neither the device nor its logarithms show in the result, and it
is the same as the pure sampler's. Rows are handled one by one: what stands beside a row cannot change its
sample. This file knows no model, sequence or wire.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from workers import noise
from workers.engines.engine import Sample, Score
from workers.pure_sampler import (
    GREEDY_BELOW,
    NO_TOKEN,
    SLACK,
    forbidden_tokens,
    noisy_best,
    noisy_score,
    ranked_tokens,
)
from workers.tensor_distribution import TensorDistribution

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ipc.messages import SamplingSpec
    from workers.engines.engine import Draw

_DISTANCES = (4.0, 6.0, 8.0, 10.0, 12.0, 14.0, math.inf)
"""How far below the best logit the best tokens are looked for, until there are enough: on a CPU some
selections by a bound and a sort of few tokens cost less than torch.topk, and far less than a sort of all."""

FEW = 64
"""So many tokens are scored one by one, which is faster than a row of small tensor operations."""

_FLOAT32_MARGIN = 1e-4
"""More than float32 loses in the log-score of a token that can win, which is at most 26 below the best."""


class Sampler:
    """Samples rows of logits [vocabulary_size] with buffers on `device`; for one thread at a time."""

    def __init__(self, vocabulary_size: int, device: str | torch.device) -> None:
        self.vocabulary_size = vocabulary_size
        self._on_cpu = torch.device(device).type == "cpu"
        self._tokens = torch.arange(vocabulary_size, dtype=torch.int32, device=device)
        self._words = torch.empty_like(self._tokens)
        self._shifted = torch.empty_like(self._tokens)
        self._weights = torch.empty(vocabulary_size, dtype=torch.float32, device=device)
        self._counts = torch.empty_like(self._weights)

    @torch.inference_mode()
    def confidences(self, logits: Tensor, tokens: Sequence[int], out: Tensor | None = None) -> list[float]:
        """The probability of a token for each row of float32 `logits` [n, vocabulary_size], at temperature 1.

        `out`: storage to work in, float32 [n].
        """
        index = torch.tensor(tokens, dtype=torch.long, device=logits.device)
        total = torch.logsumexp(logits, dim=1, out=out)
        chances: list[float] = (logits.gather(1, index[:, None]).squeeze(1) - total).exp().tolist()
        return chances

    @torch.inference_mode()
    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sample]:
        """One sample for each row of `logits` [n, vocabulary_size]; rows not in float32 are converted to it.

        Log-probabilities are float32, of the row as given: before masks, temperature and filters.
        Raises FloatingPointError naming the row if it has NaN or +inf, or masks leave no token; ValueError if
        the shape is not [len(draws), vocabulary_size].
        """
        if logits.shape != (len(draws), self.vocabulary_size):
            wanted = (len(draws), self.vocabulary_size)
            raise ValueError(f"logits must have the shape {wanted}, got {tuple(logits.shape)}")
        rows = logits.detach().float()
        best = self._best(rows)
        return [self._sample_row(i, rows[i], draw, *best[i]) for i, draw in enumerate(draws)]

    @torch.inference_mode()
    def ranked(self, logits: Tensor, draws: Sequence[Draw], count: int) -> list[list[int]]:
        """For each row up to `count` tokens, the likeliest first, to be its sample.

        Found among the FEW best by logit, so with much noise some may be missing: good enough to guess.
        """
        ranks = []
        for row, draw in zip(logits.detach().float(), draws, strict=True):
            allowed = self._edited(row, draw)
            greedy = draw.sampling.temperature < GREEDY_BELOW
            best, tokens = allowed.topk(min(count if greedy else FEW, allowed.numel()))
            named = [(t, v) for t, v in zip(tokens.tolist(), best.tolist(), strict=True) if math.isfinite(v)]
            ranks.append(ranked_tokens(named, draw)[:count])
        return ranks

    @torch.inference_mode()
    def scores(self, logits: Tensor, tokens: Sequence[int], alternatives: int) -> list[Score]:
        """For each row of `logits` [n, vocabulary_size] what it says of its token.

        Log-probabilities are those that `sample` gives. Raises FloatingPointError as it does.
        """
        rows = logits.detach().float()
        found = []
        for index, (row, token, (_, best)) in enumerate(zip(rows, tokens, self._best(rows), strict=True)):
            if not math.isfinite(best):
                raise FloatingPointError(f"row {index}: {NO_TOKEN}")
            said = self._with_logprobs(row, token, best, alternatives)
            assert said.logprob is not None, "it was asked for"
            found.append(Score(said.logprob, said.top, 1 + int((row > row[token]).sum())))
        return found

    def words(self, row: noise.Key, tokens: Tensor) -> Tensor:
        """`noise.word` of each of `tokens` (int32 [n], n ≤ vocabulary_size) as the same 32 bits in int32 [n].

        The result is a buffer that the next call overwrites.
        """
        x, y = self._words[: tokens.numel()], self._shifted[: tokens.numel()]
        offset = torch.tensor(_signed(row.offset), dtype=torch.int32)
        torch.add(offset, tokens, alpha=_signed(row.multiplier), out=x)
        for shift, multiplier in ((16, noise.MULTIPLIER_1), (15, noise.MULTIPLIER_2), (16, None)):
            torch.bitwise_right_shift(x, shift, out=y)
            # The shift fills with the sign; the mask makes it the logical one of the definition.
            x.bitwise_xor_(y.bitwise_and_((1 << (32 - shift)) - 1))
            if multiplier is not None:
                x.mul_(_signed(multiplier))
        return x

    def _sample_row(self, index: int, row: Tensor, draw: Draw, token: int, best: float) -> Sample:
        """Sample of a row whose first largest logit is `best`, of `token`."""
        row_best = best
        allowed, token, best = self._sound(index, row, draw, token, best)
        if draw.sampling.temperature >= GREEDY_BELOW:
            token = self._noisy_best(allowed, best, draw)
        if draw.sampling.logprobs is None:
            return Sample(token)
        return self._with_logprobs(row, token, row_best, draw.sampling.logprobs)

    @torch.inference_mode()
    def distribution(self, logits: Tensor, draw: Draw, index: int = 0) -> TensorDistribution:
        """What `sample` samples a row [vocabulary_size] from, at a temperature that is not greedy.

        `index`: of the row, for the FloatingPointError that `sample` would raise, too.
        """
        row = logits.detach().float()
        allowed, _, best = self._sound(index, row, draw, *self._best(row[None])[0])
        weights = _weights(allowed, best, draw.sampling.temperature)
        if (kept := self._kept(allowed, best, draw.sampling)) is not None:
            weights = torch.zeros_like(weights).index_copy_(0, kept, weights[kept])
        return TensorDistribution(
            weights, lambda count: self._best_tokens(allowed, best, min(count, self.vocabulary_size))
        )

    def _sound(
        self, index: int, row: Tensor, draw: Draw, token: int, best: float
    ) -> tuple[Tensor, int, float]:
        """The edited row, its first largest logit's token and that logit, which are `token` and `best` before
        the edit. Raises FloatingPointError if there is nothing to sample."""
        allowed = row
        if math.isfinite(best):
            allowed = self._edited(row, draw)
            if allowed is not row:
                token, best = self._best(allowed[None])[0]
        if not math.isfinite(best):
            raise FloatingPointError(f"row {index}: {NO_TOKEN}")
        return allowed, token, best

    def _edited(self, row: Tensor, draw: Draw) -> Tensor:
        """The row with all that the draw does to it first; itself if that is nothing."""
        if draw.edit is not None:
            # On the CPU whatever the device: few requests have one, and there is one definition of it.
            return torch.from_numpy(draw.edit.applied(row.cpu().numpy())).to(row.device)
        if forbidden := forbidden_tokens(draw, self.vocabulary_size):
            row = row.clone()
            row[forbidden] = -math.inf
        return row

    def _best(self, rows: Tensor) -> list[tuple[int, float]]:
        """Of each row the first id with the largest logit, and that logit; NaN counts as the largest.

        Exact whatever the number of rows, so the one place where they are handled together. numpy's argmax is
        vectorised on the CPU and torch's is not: a tenth of the time.
        """
        tokens = torch.from_numpy(rows.numpy().argmax(axis=1)) if self._on_cpu else rows.argmax(dim=1)
        logits = rows.gather(1, tokens[:, None])[:, 0]
        return list(zip(tokens.tolist(), logits.tolist(), strict=True))

    def _noisy_best(self, row: Tensor, best: float, draw: Draw) -> int:
        """The id with the largest logit / temperature + Gumbel noise -log(E) of those that the filters keep.

        With w = exp(logit / temperature) it is the one with the largest w / E. As E = -log1p(-v) ≥ v, that is
        at most w / v, so only tokens whose w / v reaches the w / E of some token, here the leader, can win.
        """
        kept = self._kept(row, best, draw.sampling)
        tokens = self._tokens if kept is None else kept.int()
        logits = row if kept is None else row[kept]
        if tokens.numel() <= FEW:
            return noisy_best(tokens.tolist(), logits.tolist(), best, draw)
        bounds = torch.sub(logits, best, out=self._weights[: tokens.numel()])
        bounds.div_(draw.sampling.temperature).exp_()
        key = noise.key(draw.sampling.seed, draw.position, noise.TARGET)
        counts = self._counts[: tokens.numel()].copy_(self.words(key, tokens).view(torch.uint32))
        bounds.div_(counts.add_(0.5))

        leader = int(bounds.numpy().argmax()) if self._on_cpu else int(bounds.argmax())
        leading_score = noisy_score(int(tokens[leader]), float(logits[leader]), best, key, draw)
        reached = math.exp(leading_score - _FLOAT32_MARGIN) * 2.0**-32
        candidates = self._at_least(bounds, reached)
        if candidates.numel() == 1:
            return int(tokens[leader])
        return noisy_best(tokens[candidates].tolist(), logits[candidates].tolist(), best, draw)

    def _at_least(self, values: Tensor, bound: float) -> Tensor:
        """Indices of values ≥ bound, ascending."""
        if self._on_cpu:  # Ten times as fast as nonzero of a torch mask.
            return torch.from_numpy(np.flatnonzero(values.numpy() >= bound))
        return (values >= bound).nonzero().flatten()

    def _kept(self, row: Tensor, best: float, sampling: SamplingSpec) -> Tensor | None:
        """Ids that top_k, top_p and min_p leave, or None for all."""
        size = row.numel()
        top_k = min(sampling.top_k or size, size)
        if top_k == size and sampling.top_p >= 1.0:
            if sampling.min_p <= 0.0:
                return None
            scaled = row.sub(best).div_(sampling.temperature)
            return self._at_least(scaled, math.log(sampling.min_p) - SLACK)
        if top_k < size:
            tokens = self._best_tokens(row, best, top_k)
            weights = _weights(row[tokens], best, sampling.temperature)
            mass = float(weights.sum())
        else:
            tokens, mass = self._nucleus(row, best, sampling)
            weights = _weights(row[tokens], best, sampling.temperature)
        return tokens[: _kept_prefix(weights, mass, sampling)]

    def _best_tokens(self, row: Tensor, best: float, count: int) -> Tensor:
        """Ids of the `count` best tokens, best first."""
        return self._leading(row, best, _DISTANCES, lambda tokens: tokens.numel() >= count)[:count]

    def _nucleus(self, row: Tensor, best: float, sampling: SamplingSpec) -> tuple[Tensor, float]:
        """Best tokens, best first, with at least top_p of the mass; and the mass of all, 1 for the best."""
        weights = torch.sub(row, best, out=self._weights)
        mass = float(weights.div_(sampling.temperature).exp_().sum(dtype=torch.float64))
        wanted = (sampling.top_p - SLACK) * mass
        # All tokens below this one's weight together have less than 1 - top_p, so it bounds the search.
        farthest = -math.log((1.0 - sampling.top_p) * mass / row.numel())
        distances = [sampling.temperature * min(distance, farthest) for distance in _DISTANCES]
        tokens = self._leading(row, best, distances, lambda tokens: bool(weights[tokens].sum() >= wanted))
        return tokens, mass

    def _leading(
        self, row: Tensor, best: float, distances: Sequence[float], enough: Callable[[Tensor], bool]
    ) -> Tensor:
        """Ids of the tokens within the first of `distances` below `best` that holds enough, best first."""
        for distance in distances:
            tokens = self._at_least(row, best - distance)
            if enough(tokens):
                break
        # They are in the order of ids, which a stable sort keeps among tied ones.
        return tokens[row[tokens].sort(descending=True, stable=True).indices]

    def _with_logprobs(self, row: Tensor, token: int, best: float, alternatives: int) -> Sample:
        total = row.logsumexp(dim=0)
        logprob = float(row[token] - total)
        if alternatives == 0:
            return Sample(token, logprob)
        tokens = self._best_tokens(row, best, min(alternatives, row.numel()))
        found = zip(tokens.tolist(), (row[tokens] - total).tolist(), strict=True)
        return Sample(token, logprob, tuple(found))


def _weights(values: Tensor, best: float, temperature: float) -> Tensor:
    return values.double().sub_(best).div_(temperature).exp_()


def _kept_prefix(weights: Tensor, mass: float, sampling: SamplingSpec) -> int:
    """How many of the best tokens stay: `weights` (float64, descending, 1 for the best) hold the nucleus."""
    keep = weights.numel()
    if sampling.top_p < 1.0:
        missing = weights.cumsum(dim=0) < (sampling.top_p - SLACK) * mass
        keep = min(keep, int(missing.sum()) + 1)
    if sampling.min_p > 0.0:
        keep = min(keep, int((weights >= sampling.min_p * math.exp(-SLACK)).sum()))
    return keep


def _signed(word: int) -> int:
    """The int32 with the bits of a 32-bit word."""
    return word - (1 << 32) if word >> 31 else word
