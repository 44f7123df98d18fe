"""Totals of an executor since its start, for whoever watches. Written by the coordinator's thread only."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from executor.request import Acceptance

_ROUNDS_KEPT = 4096


class RoundTime(NamedTuple):
    """One round, in nanoseconds. draft: what the speculator computed while the target waited for it; verify:
    what the target computed; wire: how much longer both took to answer. The rest is the coordinator's.

    sequences: so many were verified of those that were running. rows: logit rows that the target ran. tokens:
    how many were committed, of all sequences. reads: whether it ran history, too.
    """

    total: int
    draft: int
    verify: int
    wire: int
    sequences: int
    running: int
    rows: int
    tokens: int
    reads: bool

    @property
    def coordinator(self) -> int:
        return max(0, self.total - self.draft - self.verify - self.wire)


class Load(NamedTuple):
    """Sequences that run and wait, and the tokens that the running ones hold."""

    running: int
    waiting: int
    tokens: int


@dataclass(slots=True)
class Stats:
    """missed: drafts that did not come. invalid: drafts refused for what they held. broken: drafts that the
    speculator could not compute. catch_ups: orders that only told the speculator more. quarantined: sequences
    continued without drafts. preempted: how often a running sequence had to wait for memory.
    spared: guesses that were not verified, since others were likelier. round_ns,
    draft_ns, verify_ns: sums of what RoundTime says of each round.
    hypotheses: guesses of a verdict still in flight that are prepared per sequence, N. hits, misses: verdicts
    that were among them, and that were not.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    rounds: int = 0
    missed: int = 0
    invalid: int = 0
    broken: int = 0
    catch_ups: int = 0
    quarantined: int = 0
    preempted: int = 0
    spared: int = 0
    hypotheses: int = 0
    hits: int = 0
    misses: int = 0
    round_ns: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    round_times: deque[RoundTime] = field(default_factory=lambda: deque(maxlen=_ROUNDS_KEPT))
