"""A language model without weights: the next token hangs on a hash of the last few. No torch, no numpy.

It owns what a real engine owns, tokens per sequence with their limits, so that protocol, fault and overhead
tests can run real worker processes that start in milliseconds. It knows nothing of speculation or the wire.
"""

from __future__ import annotations

import hashlib
import math
import time
from typing import TYPE_CHECKING, Protocol

from ipc.messages import Vocabulary
from ipc.toy import ToyParameters
from workers import noise
from workers.blocks import blocks_for
from workers.engines.engine import Sample
from workers.engines.weightless import Weightless
from workers.pure_sampler import GREEDY_BELOW, distribution, ranked_row, sample_row, score

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import LaneSpec
    from workers.distribution import Distribution
    from workers.engines.engine import Draw, Score, Window

FAVOURITE_LOGIT = 4.0
"""Above all other logits, which are uniform in [-3, 3)."""

PREFERRED_LOGIT = 5.0
"""Of the token that a toy prefers where it is only near another: its favourite comes second."""

_POINTER_BYTES = 8
_MASK64 = 0xFFFFFFFFFFFFFFFF
_UNRELATED = 1
_NEAR = 2
_STATE_BITS = 64
_OVERSLEPT = 0.0004
"""Seconds: a sleeper may wake up so late."""


class ToyModel:
    """Distributions by context. A context's `state` is a 64-bit word from which everything else follows.

    States are Python's hashes of tuples of integers: fast, unsalted, and the same in every process of one
    Python version, which is all that the lanes of one executor need.
    """

    def __init__(self, parameters: ToyParameters) -> None:
        self.size = parameters.vocabulary
        self.order = parameters.order
        self._seed = parameters.seed
        self._agree_below = round(parameters.agree * (1 << 64))
        self._near_below = round(parameters.near * (1 << 64))

    def state(self, context: Sequence[int]) -> int:
        """State after these tokens, of which only the last `order` count. Where this toy is only near the one
        that it is to agree with, what comes above the 64 bits is one more than the token that it prefers."""
        state = hash((self._seed, *context[-self.order :])) & _MASK64
        if state >= self._agree_below:
            word = hash((state, _NEAR)) & _MASK64
            if word < self._near_below:
                other = (state + 1 + word % (self.size - 1)) % self.size
                return (other + 1) << _STATE_BITS | state
            return hash((state, _UNRELATED)) & _MASK64
        return state

    def favourite(self, state: int) -> int:
        """The most probable token: the argmax of `logits` without computing them."""
        preferred = state >> _STATE_BITS
        return preferred - 1 if preferred else state % self.size

    def likeliest(self, state: int) -> list[int]:
        """The tokens that stand out, the most probable first."""
        preferred = state >> _STATE_BITS
        return [*([preferred - 1] if preferred else []), (state & _MASK64) % self.size]

    def logits(self, state: int) -> list[float]:
        """Logits [vocabulary], each exact in float32, so that a sampler on tensors can be given the same."""
        preferred, state = state >> _STATE_BITS, state & _MASK64
        row = noise.Key((state >> 32) | 1, state & 0xFFFFFFFF)
        logits = [(noise.word(row, token) >> 12) * (6 * 2.0**-20) - 3.0 for token in range(self.size)]
        logits[state % self.size] = FAVOURITE_LOGIT
        if preferred:
            logits[preferred - 1] = PREFERRED_LOGIT
        return logits


class Clock(Protocol):
    """Seconds, monotonic."""

    def now(self) -> float: ...

    def sleep_until(self, then: float) -> None: ...


class RealClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, then: float) -> None:
        """As a device would take its time: to the point, and with the lane at work to the end."""
        while (left := then - time.monotonic()) > 0:
            if left > _OVERSLEPT:
                time.sleep(left - _OVERSLEPT)


class ToyEngine(Weightless):
    """Implements `workers.engines.engine.Engine`; a row of logits is held as its context's state."""

    def __init__(self, spec: LaneSpec, clock: Clock | None = None) -> None:
        """`spec.model` holds the ToyParameters; `spec.max_model_len` 0 means all of `context`. `clock`: by
        which a step takes its time, if not by the real one.

        Raises ValueError if the parameters are wrong.
        """
        self.parameters = ToyParameters.parse(spec.model)
        self.model = ToyModel(self.parameters)
        self._max_sequences = spec.max_sequences
        self._max_model_len = min(spec.max_model_len or self.parameters.context, self.parameters.context)
        super().__init__(spec, self._max_model_len, _POINTER_BYTES)
        self._held: dict[int, list[int]] = {}
        self._forks: set[int] = set()
        self._plain_samples: dict[int, Sample] = {}
        self._clock = clock or RealClock()
        size = self.parameters.vocabulary
        self._vocabulary = Vocabulary(size, hashlib.sha256(f"toy {size}".encode()).hexdigest())

    @property
    def vocabulary(self) -> Vocabulary:
        """All toys with equally many tokens share one vocabulary."""
        return self._vocabulary

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def notes(self) -> list[str]:
        return [f"toy model without weights: {self.parameters}"]

    def open(self, seq: int, tokens: Sequence[int] = ()) -> int:
        """Raises MemoryError if max_sequences are open, ValueError if this one is."""
        if len(self._held) - len(self._forks) >= self._max_sequences and seq not in self._held:
            raise MemoryError(f"no room for sequence {seq}: max_sequences={self._max_sequences} are open")
        count = self.pool.open(seq, tokens)
        self._held[seq] = list(tokens[:count])
        return count

    def close(self, seq: int) -> None:
        """Raises KeyError if the sequence is not open."""
        self.pool.close(seq)
        del self._held[seq]
        self._forks.discard(seq)

    def fork(self, seq: int, other: int) -> None:
        self.pool.fork(seq, other)
        self._held[other] = list(self._held[seq])
        self._forks.add(other)

    def replace(self, seq: int, other: int) -> None:
        self.pool.replace(seq, other)
        self._held[seq] = self._held.pop(other)
        self._forks.discard(other)

    def room(self, length: int) -> int:
        own = len(self._held) - len(self._forks)
        return max(0, self.pool.available // (blocks_for(length) + 1) - own)

    def forward(self, windows: Sequence[Window]) -> list[int]:
        """States of the wanted rows. Raises KeyError for an unknown sequence, ValueError for a bad window."""
        started = self._clock.now()
        state, order = self.model.state, self.model.order
        states: list[int] = []
        for window in windows:
            held = self._take(window)
            if window.rows > 1:
                ends = range(len(held) - window.rows + 1, len(held))
                states += [state(held[max(0, end - order) : end]) for end in ends]
            if window.rows:
                states.append(state(held))
        seconds = self.parameters.step_ms * 1e-3 + self.parameters.row_us * 1e-6 * len(states)
        if seconds:
            self._clock.sleep_until(started + seconds)
        return states

    def sample(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Sample]:
        samples = []
        favourite, plain = self.model.favourite, self._plain_samples
        for state, draw in zip(rows, draws, strict=True):
            sampling, _, generated, edit = draw
            token = favourite(state)
            greedy = sampling.temperature < GREEDY_BELOW and sampling.logprobs is None and edit is None
            if greedy and (generated >= sampling.min_tokens or token not in sampling.stop_token_ids):
                # Samples are immutable, so one per token serves all; a new one is half the cost of a row.
                samples.append(plain.get(token) or plain.setdefault(token, Sample(token)))
            else:
                samples.append(sample_row(self.model.logits(state), draw))
        return samples

    def distribution(self, rows: Sequence[int], index: int, draw: Draw) -> Distribution:
        return distribution(self.model.logits(rows[index]), draw)

    def scores(self, rows: Sequence[int], tokens: Sequence[int], alternatives: int) -> list[Score]:
        return [
            score(self.model.logits(state), token, alternatives)
            for state, token in zip(rows, tokens, strict=True)
        ]

    def ranked(self, rows: Sequence[int], draws: Sequence[Draw], count: int) -> list[list[int]]:
        ranks = []
        for state, draw in zip(rows, draws, strict=True):
            if draw.sampling.temperature < GREEDY_BELOW and draw.edit is None:
                ranks.append(self.model.likeliest(state)[:count])  # what comes after them is far behind
            else:
                ranks.append(ranked_row(self.model.logits(state), draw, count))
        return ranks

    def confidences(self, rows: Sequence[int], tokens: Sequence[int]) -> list[float]:
        return [
            _probabilities(self.model.logits(state), 1.0)[token]
            for state, token in zip(rows, tokens, strict=True)
        ]

    def exact_probabilities(self, context: Sequence[int], temperature: float) -> list[float]:
        """Probabilities [vocabulary] of the token after `context`, unfiltered; the temperature is above 0."""
        return _probabilities(self.model.logits(self.model.state(context)), temperature)

    def _take(self, window: Window) -> list[int]:
        """Hold the tokens of the window from its start on, and nothing beyond; returns all that is held."""
        seq, start, tokens, rows = window
        held = self._held.get(seq)
        if held is None:
            raise KeyError(f"sequence {seq} is not open")
        if not 0 <= start <= len(held):
            raise ValueError(f"sequence {seq}: window starts at {start}, but {len(held)} tokens are held")
        count = len(tokens)
        if start + count > self._max_model_len:
            raise ValueError(f"sequence {seq}: {start + count} tokens, but at most {self._max_model_len} fit")
        if not 0 <= rows <= count:
            raise ValueError(f"sequence {seq}: {rows} rows of logits wanted from {count} tokens")
        size = self.model.size
        for token in tokens:
            if not 0 <= token < size:
                raise ValueError(f"sequence {seq}: token {token} is outside the vocabulary of {size}")
        self.pool.truncate(seq, start)
        self.pool.reserve(seq, count)
        self.pool.append(seq, tokens)
        held[start:] = tokens
        return held


def _probabilities(logits: Sequence[float], temperature: float) -> list[float]:
    weights = [math.exp((logit - FAVOURITE_LOGIT) / temperature) for logit in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]
