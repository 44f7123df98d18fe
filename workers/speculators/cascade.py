"""The `eagle` and `cascade` speculators: a drafting head alone, or a head and lookups, token by token.

A lookup costs microseconds and a step of the head milliseconds. So the head is left out of a draft from where
a lookup is nearly sure, and where the target is not likely to get to; otherwise the guess that is more likely
right is taken. The head guesses with the target's own noise, so coupled acceptance works at any temperature.
Where guesses are to be drawn, all of this is decided before the head's token is: by its row alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ipc import vocabulary
from workers.device import open_device
from workers.footprint import Footprint, KvNeed
from workers.outcomes import ALTERNATIVES
from workers.sampler import Sampler
from workers.speculator import never
from workers.speculators import lookup
from workers.speculators.calibration import Calibration
from workers.speculators.chain import Chain, Held, Trail
from workers.speculators.head import Entry, Head, Read
from workers.speculators.history import TOKEN_BYTES
from workers.speculators.lookup import Lookup
from workers.speculators.opinion import first_estimate, opinion
from workers.speculators.prior import Prior
from workers.speculators.proposals import NOT_DRAWN, Judge, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from ipc.messages import LaneSpec, MemoryProfile, StepTime, Vocabulary
    from workers.q_row import DrawnFrom
    from workers.sequence import LaneSequence
    from workers.speculator import Ask, News

_BRANCH_BYTES = 128 << 20
"""What contexts of branches take at most."""


class DrawnGuess(NamedTuple):
    """Kind of a head's guess that is drawn only if it is taken: how many steps of its own the head is away
    from the target's rows, the probability of the likeliest token in tenths."""

    step: int
    tenths: int


class Judged(NamedTuple):
    """Guesses for the next token with the head's own among them, and what the head thinks next likely."""

    proposals: list[Proposal]
    runners_up: Sequence[int]


class CascadeSpeculator:
    """Where the head has not got the latest row of a sequence, lookups draft alone, if there are any."""

    prefers_fresh = True

    pass_tokens = 0

    reused_tokens = 0

    def __init__(self, spec: LaneSpec) -> None:
        """Raises ValueError or OSError if the head cannot be had."""
        assert spec.head is not None, "a head is what this speculator is made of"
        if spec.threads > 0:
            torch.set_num_threads(spec.threads)
        self._home = open_device(spec.device)
        self._footprint = Footprint(self._home)
        target = Path(spec.model)
        self._vocabulary = vocabulary.read(target)
        self._max_model_len = spec.max_model_len
        with torch.inference_mode():
            device = torch.device(self._home.name)
            self._head = Head(spec.head, target, device, narrow=spec.dtype != "fp32")
        self._sampler = Sampler(self._vocabulary.size, device)
        calibration = Calibration(_first_estimate)
        self._calibration = calibration
        self._judge = Judge(calibration)
        self._lookup: Lookup | None = None
        if spec.engine == "cascade":
            prior = Prior(Path(spec.prior)) if spec.prior else None
            self._lookup = Lookup(spec.max_model_len, prior, calibration)
        self._rows = torch.empty(0, self._vocabulary.size, device=device)
        self._held: dict[int, Held] = {}
        self._branches: set[int] = set()
        self._most_branches = _BRANCH_BYTES // max(1, self._head.context().nbytes)
        self._trails: dict[int, Trail] = {}
        # A context has a fixed size, whatever the length of its sequence.
        per_token = -(-self._head.context().nbytes // spec.max_model_len)
        per_token += TOKEN_BYTES if self._lookup is not None else 0
        self._need = KvNeed(per_token, 1, spec.max_sequences * spec.max_model_len)
        self._footprint.loaded()

    # ------------------------------------------------------------ Served

    @property
    def served(self) -> CascadeSpeculator:
        return self

    @property
    def vocabulary(self) -> Vocabulary:
        return self._vocabulary

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def notes(self) -> list[str]:
        return []

    @property
    def step_times(self) -> list[StepTime]:
        return []

    @property
    def device_id(self) -> str:
        return self._home.identity

    def set_up_attention(self) -> None:
        """Nothing to choose: one row at a time."""

    def profile(self) -> MemoryProfile:
        return self._footprint.profile(self.warm_up, self._need, lambda: 0)

    def allocate(self, kv_tokens: int) -> None:
        """A sequence's context is made when it opens."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """A window of rows, then steps of one and of two sequences."""
        head = self._head
        rows = head.fuse(torch.zeros(head.window, head.row_bytes // 2, dtype=torch.bfloat16))
        contexts = [head.context(), head.context()]
        for context in contexts:
            head.absorb([Read(rows, [0] * len(rows), 0, context)])
        for count in (1, 2):
            head.step([Entry(rows[0], 0, head.window, context) for context in contexts[:count]])

    def capture(self) -> str:
        return "none"

    def lock(self) -> None:
        """Holds no workspace."""

    # ------------------------------------------------------------ Speculator

    def open(self, sequence: LaneSequence) -> None:
        self._held[sequence.seq] = Held(self._head.context())
        if self._lookup is not None:
            self._lookup.open(sequence)

    def close(self, sequence: LaneSequence) -> None:
        del self._held[sequence.seq]
        self._branches.discard(sequence.seq)
        self._trails.pop(sequence.seq, None)
        self._judge.forget(sequence)
        if self._lookup is not None:
            self._lookup.close(sequence)

    def fork(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._branches.add(branch.seq)
        start = len(sequence.tokens)
        trail = self._trails.get(sequence.seq)
        self._held[branch.seq] = (
            trail.leave(start, branch.tokens[start:-1]) if trail else Held(self._head.context())
        )
        if self._lookup is not None:
            self._lookup.fork(sequence, branch)

    def adopt(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        self._judge.adopt(sequence, branch)
        self._trails.pop(sequence.seq, None)
        if branch.seq in self._trails:
            self._trails[sequence.seq] = self._trails.pop(branch.seq)
        self.close(branch)

    def room(self, length: int) -> int:
        """A branch has a context of its own, of a fixed size."""
        return max(0, self._most_branches - len(self._branches))

    @torch.inference_mode()
    def observe(self, news: Sequence[News]) -> None:
        """The head runs once for all rows of all sequences."""
        for sequence, _ in news:
            self._judge.learn(sequence)
        parts = [part for _, rows in news for _, part in rows]
        if not parts:
            return
        fused = iter(torch.split(self._head.fuse(torch.cat(parts)), [len(part) for part in parts]))
        reads: list[Read] = []
        grown = [sequence for sequence, rows in news if rows]
        for sequence, rows in news:
            if rows:
                self._held[sequence.seq].context.drop_drafts()
                reads += self._reads(sequence, [(start, next(fused)) for start, _ in rows])
        self._head.absorb(reads)
        for sequence in grown:
            held = self._held[sequence.seq]
            held.context.keep()
            trail = self._trails.get(sequence.seq)
            if trail is not None and trail.context is held.context:
                del self._trails[sequence.seq]  # its own indices stand in its place now

    @torch.inference_mode()
    def propose(self, asks: Sequence[Ask], cancelled: Callable[[], bool] = never) -> list[list[int]]:
        chains = [self._begin(ask) for ask in asks]
        while growing := [chain for chain in chains if not chain.ended]:
            self._grow(growing)
            if cancelled():
                break
        for ask, chain in zip(asks, chains, strict=True):
            if ask.confidences is not None:
                ask.confidences.extend(chain.draft.expected)
            if ask.others is not None:
                ask.others.extend(chain.draft.others)
            self._judge.remember(chain.sequence, chain.draft)
            self._trails[chain.sequence.seq] = chain.trail
        return [chain.draft.tokens for chain in chains]

    def _begin(self, ask: Ask) -> Chain:
        sequence = ask.sequence
        held = self._held[sequence.seq]
        held.context.drop_drafts()
        path = self._lookup.path(sequence) if self._lookup is not None else None
        return Chain(ask, held, path)

    def _reads(self, sequence: LaneSequence, parts: Sequence[tuple[int, Tensor]]) -> list[Read]:
        """What is to be taken in of rows from their positions on; the last waits for the token after it."""
        held, reads = self._held[sequence.seq], list[Read]()
        for start, rows in parts:
            first = start
            if held.row is not None and held.end == start:
                rows, first = torch.cat((held.row[None], rows)), start - 1
            else:
                # A gap: what was before is of no use, as distances would be wrong.
                held.context.clear()
                reads.clear()
            tokens = sequence.tokens[first + 1 : first + len(rows)]
            reads.append(Read(rows[:-1], tokens, first, held.context))
            held.row, held.end, held.depth = rows[-1], first + len(rows), 0
        return reads

    def _grow(self, chains: Sequence[Chain]) -> None:
        """One more token for each; the head runs once for all that want it."""
        lookups = [chain.ask_lookup() for chain in chains]
        asked = [i for i, chain in enumerate(chains) if chain.wants_head(lookups[i])]
        rows: dict[int, Tensor] = {}
        judged: dict[int, Judged] = {}
        if asked:
            next_rows, logits = self._head.step([chains[i].entry for i in asked])
            rows = dict(zip(asked, next_rows, strict=True))
            full = self._widened(logits)
            for i, narrow, row in zip(asked, logits, full, strict=True):
                try:
                    judged[i] = self._judged(chains[i], lookups[i], narrow, row)
                except FloatingPointError:  # the rows were no numbers: whoever made them has to say so
                    continue
        for i, chain in enumerate(chains):
            # What is judged by the head's opinion still teaches what such lookups are worth by themselves.
            proposals, runners_up = judged.get(i) or Judged(lookups[i], ())
            aside = [guess for guess in lookups[i] if guess not in proposals]
            chain.go(proposals, rows.get(i), aside, runners_up)

    def _widened(self, logits: Tensor) -> Tensor:
        """At their places in the whole vocabulary, -inf elsewhere; stands there until the next time."""
        if len(self._rows) < len(logits):
            self._rows = torch.full((len(logits), self._vocabulary.size), float("-inf"), device=logits.device)
        full = self._rows[: len(logits)]
        full[:, self._head.tokens] = logits
        return full

    def _judged(self, chain: Chain, lookups: list[Proposal], logits: Tensor, row: Tensor) -> Judged:
        """The head's guess beside the lookups'. `row`: `logits` at their places in the whole vocabulary.

        A guess that is not drawn yet follows from what the target would sample if it had the head's logits;
        the lookups are then seen in its light.
        """
        if chain.drawn_from is not None:
            proposals = [*lookups, self._undrawn(chain, chain.drawn_from, row)]
            if not chain.wants_others:
                return Judged(proposals, ())
            likeliest = logits.topk(min(ALTERNATIVES + 1, len(logits))).indices
            return Judged(proposals, self._head.tokens[likeliest].tolist())
        expected, draw = self._calibration.expected, chain.draw
        (sample,) = self._sampler.sample(row[None], [draw])
        said = opinion(logits, self._head.tokens, sample.token, draw)
        kind = said.kind(chain.steps_away, beside_lookups=bool(lookups))
        proposals = [Proposal(said.token, expected(kind), kind)]
        for guess in lookups:
            seconded = said.of(guess)
            proposals.append(Proposal(guess.token, expected(seconded), seconded))
        return Judged(proposals, said.others)

    def _undrawn(self, chain: Chain, drawn_from: DrawnFrom, row: Tensor) -> Proposal:
        # A copy, since what is drawn from is looked at later.
        q = drawn_from.q(self._sampler.distribution(row.clone(), chain.draw))
        kind = DrawnGuess(min(2, chain.steps_away), min(9, int(10 * q.best)))
        return Proposal(NOT_DRAWN, self._calibration.expected(kind), kind, q)


def _first_estimate(kind: Hashable) -> float:
    """A drawn guess is about as often right as the head says, as long as it sees the target's rows."""
    if isinstance(kind, DrawnGuess):
        return (kind.tenths + 0.5) / 10 * (1.0, 0.85, 0.75)[kind.step]
    return lookup.first_estimate(kind) if isinstance(kind, lookup.Kind) else first_estimate(kind)
