"""The `eagle` and `cascade` speculators: a drafting head alone, or a head and lookups, token by token.

A lookup costs microseconds and a step of the head milliseconds. So the head is left out of a draft from where
a lookup is nearly sure, and where the target is not likely to get to; otherwise the guess that is more likely
right is taken. The head guesses with the target's own noise, so coupled acceptance works at any temperature.
Where guesses are to be drawn, all of this is decided before the head's token is: by its row alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from ipc import vocabulary
from workers.device import open_device
from workers.footprint import Footprint, KvNeed
from workers.pure_sampler import GREEDY_BELOW
from workers.sampler import Sampler
from workers.speculator import never
from workers.speculators.calibration import Calibration
from workers.speculators.head import Context, Entry, Head
from workers.speculators.history import TOKEN_BYTES
from workers.speculators.lookup import Lookup, first_estimate
from workers.speculators.prior import Prior
from workers.speculators.proposals import NOT_DRAWN, Draft, Judge, Proposal

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from torch import Tensor

    from ipc.messages import LaneSpec, MemoryProfile, Vocabulary
    from workers.engines.engine import Draw
    from workers.sequence import LaneSequence
    from workers.speculator import Ask
    from workers.speculators.lookup import Path as LookupPath

SURE = 0.85
"""A lookup that is right so often needs no second opinion."""
_BRANCHES = 1 << 20
HEAD_REACH = 0.08
"""The head is not asked where the target gets to with a smaller probability: a step of it costs about a tenth
of a target step, and a token is worth about half of one."""


class HeadGuess(NamedTuple):
    """Kind of a head's guess: its place in the draft, its probability in tenths, how the target samples.

    Of a guess that is drawn only if it is taken, the probability is that of the likeliest token.
    """

    step: int
    tenths: int
    greedy: bool
    drawn: bool = False


@dataclass(slots=True)
class _Held:
    """What the head holds of a sequence: `row` [hidden] is the latest that came from the target, of the token
    at `end` - 1; the rows before it are in the context."""

    context: Context
    row: Tensor | None = None
    end: int = 0


@dataclass(slots=True)
class _Trail:
    """A draft after `start` tokens, for branches to leave it at any place: the row that each token was
    guessed from, None where the head was not asked, and where the context ended then."""

    start: int
    tokens: list[int]
    rows: list[Tensor | None]
    ends: list[int]
    context: Context

    def leave(self, start: int, stood: Sequence[int]) -> _Held:
        """What the head holds after the first tokens of the draft and another one."""
        place = len(stood)
        if start != self.start or self.tokens[:place] != list(stood) or place >= len(self.rows):
            return _Held(self.context.fork(0))
        return _Held(self.context.fork(self.ends[place]), self.rows[place], start + place)


class _Chain:
    """One sequence's draft while it grows. `row` and `token` are what the head's next step starts from."""

    def __init__(self, ask: Ask, held: _Held, path: LookupPath | None) -> None:
        tokens = ask.sequence.tokens
        self.sequence = ask.sequence
        self.draft = Draft(ask.k)
        self.drawn_from = ask.drawn_from
        self.path = path
        self.context = held.context
        # The row of the last token but one and the last token: the target has not run that one yet.
        self.row = held.row if held.end == len(tokens) - 1 else None
        self.token = tokens[-1]
        self.ended = ask.k == 0
        self._rows: list[Tensor | None] = []
        self._ends: list[int] = []

    @property
    def trail(self) -> _Trail:
        start = len(self.sequence.tokens)
        return _Trail(start, self.draft.tokens, self._rows, self._ends, self.context)

    def ask_lookup(self) -> list[Proposal]:
        return self.path.proposals() if self.path is not None else []

    def wants_head(self, proposals: list[Proposal]) -> bool:
        sure = any(proposal.expected >= SURE for proposal in proposals)
        return self.row is not None and not sure and self.draft.reach >= HEAD_REACH

    def go(self, proposals: list[Proposal], row: Tensor | None) -> None:
        """Take the best; `row` is what the head goes on from, if it was asked."""
        self.row = row
        self._rows.append(row)
        self._ends.append(self.context.end)
        token = self.draft.add(proposals, self._settle)
        self.ended = token is None or self.draft.full
        if token is not None:
            self.token = token
            if self.path is not None:
                self.path.go(token)

    def _settle(self, proposal: Proposal) -> Proposal:
        """Draw the token of what is taken, if it was not looked up; and say so."""
        if self.drawn_from is None:
            return proposal
        if proposal.q is None:
            self.drawn_from.look_up()
            return proposal
        token = self.drawn_from.draw(proposal.q, self.sequence, len(self.draft.tokens))
        return proposal._replace(token=token)

    @property
    def entry(self) -> Entry:
        """The head's next step. Only for those that want it."""
        assert self.row is not None, "the head has nothing to start from"
        position = len(self.sequence.tokens) - 2 + len(self.draft.tokens)
        return Entry(self.row, self.token, position, self.context)

    @property
    def draw(self) -> Draw:
        return self.sequence.draws(self.draft.tokens, rows=1)[0]


class CascadeSpeculator:
    """Where the head has not got the latest row of a sequence, lookups draft alone, if there are any."""

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
        self._held: dict[int, _Held] = {}
        self._trails: dict[int, _Trail] = {}
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
            head.absorb(rows, [0] * len(rows), 0, context)
        for count in (1, 2):
            head.step([Entry(rows[0], 0, head.window, context) for context in contexts[:count]])

    def capture(self) -> str:
        return "none"

    def lock(self) -> None:
        """Holds no workspace."""

    # ------------------------------------------------------------ Speculator

    def open(self, sequence: LaneSequence) -> None:
        self._held[sequence.seq] = _Held(self._head.context())
        if self._lookup is not None:
            self._lookup.open(sequence)

    def close(self, sequence: LaneSequence) -> None:
        del self._held[sequence.seq]
        self._trails.pop(sequence.seq, None)
        self._judge.forget(sequence)
        if self._lookup is not None:
            self._lookup.close(sequence)

    def fork(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        start = len(sequence.tokens)
        trail = self._trails.get(sequence.seq)
        self._held[branch.seq] = (
            trail.leave(start, branch.tokens[start:-1]) if trail else _Held(self._head.context())
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
        return _BRANCHES

    @torch.inference_mode()
    def observe(self, sequence: LaneSequence, rows: Sequence[tuple[int, Tensor]]) -> None:
        self._judge.learn(sequence)
        held = self._held[sequence.seq]
        for start, part in rows:
            held.context.drop_drafts()
            self._absorb(sequence, held, start, self._head.fuse(part))
        trail = self._trails.get(sequence.seq)
        if rows and trail is not None and trail.context is held.context:
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

    def _begin(self, ask: Ask) -> _Chain:
        sequence = ask.sequence
        held = self._held[sequence.seq]
        held.context.drop_drafts()
        path = self._lookup.path(sequence) if self._lookup is not None else None
        return _Chain(ask, held, path)

    def _absorb(self, sequence: LaneSequence, held: _Held, start: int, rows: Tensor) -> None:
        """Take in rows of positions from `start` on; the last waits for the token that follows it."""
        if held.row is not None and held.end == start:
            rows, start = torch.cat((held.row[None], rows)), start - 1
        else:
            held.context.clear()  # a gap: what was before is of no use, as distances would be wrong
        tokens = sequence.tokens[start + 1 : start + len(rows)]
        self._head.absorb(rows[:-1], tokens, start, held.context)
        held.context.keep()
        held.row, held.end = rows[-1], start + len(rows)

    def _grow(self, chains: Sequence[_Chain]) -> None:
        """One more token for each; the head runs once for all that want it."""
        proposals = [chain.ask_lookup() for chain in chains]
        asked = [i for i, chain in enumerate(chains) if chain.wants_head(proposals[i])]
        rows: dict[int, Tensor] = {}
        if asked:
            next_rows, logits = self._head.step([chains[i].entry for i in asked])
            guesses = self._guesses(logits, [chains[i] for i in asked])
            for i, row, guess in zip(asked, next_rows, guesses, strict=True):
                rows[i] = row
                proposals[i] += guess
        for i, chain in enumerate(chains):
            chain.go(proposals[i], rows.get(i))

    def _guesses(self, logits: Tensor, chains: Sequence[_Chain]) -> list[list[Proposal]]:
        """What the target would sample if it had the head's logits: a proposal for each, or none."""
        full = torch.full((len(logits), self._vocabulary.size), float("-inf"), device=logits.device)
        full[:, self._head.tokens] = logits
        totals = logits.logsumexp(dim=1)
        guesses: list[list[Proposal]] = []
        for row, total, chain in zip(full, totals, chains, strict=True):
            try:
                guesses.append([self._guess(row, float(total), chain)])
            except FloatingPointError:  # the rows were no numbers: whoever made them has to say so
                guesses.append([])
        return guesses

    def _guess(self, row: Tensor, total: float, chain: _Chain) -> Proposal:
        """`total`: logarithm of the row's mass."""
        step = min(2, len(chain.draft.tokens))
        if chain.drawn_from is not None:
            q = chain.drawn_from.q(self._sampler.distribution(row, chain.draw))
            kind = HeadGuess(step, min(9, int(10 * q.best)), greedy=False, drawn=True)
            return Proposal(NOT_DRAWN, self._calibration.expected(kind), kind, q)
        (sample,) = self._sampler.sample(row[None], [chain.draw])
        tenths = int(10 * math.exp(float(row[sample.token]) - total))
        greedy = chain.sequence.sampling.temperature < GREEDY_BELOW
        kind = HeadGuess(step, min(9, tenths), greedy)
        return Proposal(sample.token, self._calibration.expected(kind), kind)


def _first_estimate(kind: Hashable) -> float:
    """A head is about as often right as it says, as long as it sees the target's rows."""
    if isinstance(kind, HeadGuess):
        return (kind.tenths + 0.5) / 10 * (1.0, 0.85, 0.75)[kind.step]
    return first_estimate(kind)
