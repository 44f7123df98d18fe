"""Whether waiting for drafts pays: tokens per second of rounds that wait for them, and of those that do not.

Pure; the times are the caller's. Both ways are measured, so the answer holds for whatever makes drafts dear:
a long way to a server, a server with many clients, guesses that are wrong. The way that seems worse is tried
again from time to time, and so seldom that trials cost no more than a small share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL_ROUNDS = 8
TRIAL_SHARE = 0.02
"""Of all time, that trials may lose."""
_LEAST_SECONDS = 1.0
"""Between two trials."""
_MEMORY = 1 - 1 / 32
"""What each round leaves of the weight of those before it."""


@dataclass(slots=True)
class _Way:
    """What rounds of one way came to, the latest weighing most."""

    rounds: int = 0
    weight: float = 0.0
    seconds: float = 0.0
    tokens: float = 0.0

    def note(self, seconds: float, tokens: int) -> None:
        self.rounds += 1
        self.weight = self.weight * _MEMORY + 1.0
        self.seconds = self.seconds * _MEMORY + seconds
        self.tokens = self.tokens * _MEMORY + tokens

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def known(self) -> bool:
        return self.rounds >= TRIAL_ROUNDS


@dataclass(slots=True)
class _Case:
    """One number of sequences. `better`: whether waiting is; `trial`: rounds left in which the other way is
    tried; `until_trial`: seconds to the next one; `lost`: what the present one has cost so far."""

    ways: dict[bool, _Way] = field(default_factory=lambda: {True: _Way(), False: _Way()})
    better: bool = True
    trial: int = 0
    until_trial: float = 0.0
    lost: float = 0.0

    @property
    def waits(self) -> bool:
        return self.better != (self.trial > 0)

    def note(self, seconds: float, tokens: int) -> None:
        self.ways[self.waits].note(seconds, tokens)
        if self.trial:
            self._tried(seconds, tokens)
        else:
            self.until_trial -= seconds
            if self.ways[self.better].known and self.until_trial <= 0:
                self._try_the_other()
        if not self.trial and all(way.known for way in self.ways.values()):
            # Known of old, the other way needs no trial to be better than what this one has become.
            self.better = self.ways[True].speed >= self.ways[False].speed

    def _try_the_other(self) -> None:
        self.trial, self.lost = TRIAL_ROUNDS, 0.0
        self.ways[not self.better] = _Way()

    def _tried(self, seconds: float, tokens: int) -> None:
        self.trial -= 1
        known = self.ways[self.better]
        self.lost += seconds - (tokens / known.speed if known.speed > 0 else 0.0)
        if self.lost > TRIAL_ROUNDS * known.seconds / known.weight:
            self.trial = 0  # it has cost as much as if nothing had come of any of its rounds
        if not self.trial:
            self.until_trial = max(self.lost / TRIAL_SHARE, _LEAST_SECONDS)


class Payoff:
    """By how many sequences run, in powers of two: what one draws from a pass, many may not."""

    def __init__(self) -> None:
        self._cases: dict[int, _Case] = {}

    def waits(self, sequences: int) -> bool:
        """Whether the next round is to wait for drafts."""
        return self._case(sequences).waits

    def note(self, sequences: int, seconds: float, tokens: int) -> None:
        """The round about which `waits` was asked last took so long and settled so many tokens."""
        self._case(sequences).note(seconds, tokens)

    def _case(self, sequences: int) -> _Case:
        return self._cases.setdefault(sequences.bit_length(), _Case())
