"""One client of a speculator server: what it may have, what it holds, what it asks. No I/O.

Its sequences have numbers of the server's own, so that no client can speak of another's. Whatever would end
the lane is refused here, before the lane hears of it: sequences that are not open, histories that do not fit
together, tokens that there are not, more than the client's share. What a client may have waiting is bounded
by that share alone: it holds so many sequences, has one order in flight, and no frames beyond that.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from executor.pace import work
from executor.pool.turns import Bid
from ipc.errors import ProtocolError, WireError
from ipc.link import Link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from executor.admission import KvRoom
    from ipc.messages import (
        Acceptance,
        Allocate,
        Configure,
        Draft,
        Drafted,
        DraftedItem,
        DraftItem,
        HiddenRows,
        OpenedSequence,
        SamplingSpec,
    )

_ANY_TOKEN = 1 << 31
_MOST_TEMPERATURE = 100.0
_LIGHT_NEWS = 64
"""Tokens of news up to which an order may share a pass; more would keep the others waiting."""
_SPARE_FRAMES = 64


class Overdrawn(WireError):
    """A client wants more than its share."""


class Terms(NamedTuple):
    """What each client may have: `seats` sequences of up to `max_model_len` tokens, `room` for their keys and
    values, drafts of up to `k` tokens below `vocabulary` (0: any), hidden rows of `row_bytes` (0: none),
    guesses made for `acceptance`."""

    seats: int
    max_model_len: int
    room: KvRoom
    k: int
    vocabulary: int
    row_bytes: int
    acceptance: Acceptance = "coupled"


class _Held:
    """A sequence: the server's number for it, and `news` if the lane has not been told of it."""

    __slots__ = ("gen", "length", "news", "number")

    def __init__(self, number: int, opened: OpenedSequence) -> None:
        self.number = number
        self.gen = opened.gen
        self.length = len(opened.tokens)
        self.news: OpenedSequence | None = msgspec.structs.replace(opened, seq=number)


class Client:
    """Methods that take an order raise ProtocolError for one that cannot be, Overdrawn for one too big."""

    def __init__(self, identity: str, epoch: str, name: str) -> None:
        self.identity = identity
        self.epoch = epoch
        self.name = name
        self.link = Link("speculator")
        self.waiting: Draft | None = None
        """What it asked that the lane has not been asked yet."""
        self.closing: list[int] = []
        """Numbers that the lane still has to hear are closed."""
        self.beats = 0
        self._terms: Terms | None = None
        self._room: KvRoom | None = None
        self._held: dict[int, _Held] = {}
        self._frames = 0

    # ------------------------------------------------------------ what it may

    @property
    def admitted(self) -> bool:
        """Whether there is a lane for it."""
        return self._terms is not None

    @property
    def terms(self) -> Terms:
        assert self._terms is not None, "nobody is spoken to before there is a lane for him"
        return self._terms

    def admit(self, terms: Terms) -> None:
        self._terms, self._room = terms, terms.room

    def count_frame(self) -> None:
        """Between two answers a client has little to say. Raises Overdrawn."""
        self._frames += 1
        if self._terms is not None and self._frames > 4 * self.terms.seats + _SPARE_FRAMES:
            raise Overdrawn(f"sent {self._frames} frames since its last answer")

    def answered(self) -> None:
        self._frames = 0

    def configured(self, order: Configure) -> str:
        """Why this server is no good for it; empty if it is."""
        spec, terms = order.spec, self.terms
        if spec.lane != "speculator":
            return f"no {spec.lane} is served here, only a speculator"
        if spec.num_speculative_tokens > terms.k:
            return (
                f"drafts of at most {terms.k} tokens are served here, not {spec.num_speculative_tokens}; "
                f"try --num-speculative-tokens {terms.k}, there or for the server"
            )
        if spec.acceptance != terms.acceptance:
            return (
                f"guesses are made for {terms.acceptance} acceptance here, not {spec.acceptance}; "
                f"try --acceptance {terms.acceptance}, there or {spec.acceptance} for the server"
            )
        if spec.max_sequences > terms.seats:
            return (
                f"each client has {terms.seats} sequences here, not {spec.max_sequences}; "
                f"try --max-sequences {terms.seats}, there or for the server"
            )
        return ""

    def allocate(self, order: Allocate) -> None:
        if not 0 <= order.kv_tokens <= self.terms.room.tokens:
            raise Overdrawn(f"each client has {self.terms.room.tokens} tokens here, not {order.kv_tokens}")
        self._room = self.terms.room._replace(tokens=order.kv_tokens)

    # ------------------------------------------------------------ what it holds

    def open(self, sequences: Sequence[OpenedSequence], numbers: Iterator[int]) -> None:
        for opened in sequences:
            if opened.seq in self._held:
                raise ProtocolError(f"sequence {opened.seq} is open already")
            if not 0 <= opened.prompt_len <= len(opened.tokens) or not opened.tokens:
                raise ProtocolError(
                    f"sequence {opened.seq} has {len(opened.tokens)} tokens, {opened.prompt_len} of prompt"
                )
            self._check_tokens(opened.tokens)
            self._check_sampling(opened.sampling)
            if len(opened.tokens) > self.terms.max_model_len:
                raise Overdrawn(f"sequence {opened.seq} is longer than {self.terms.max_model_len} tokens")
            if len(self._held) >= self.terms.seats:
                raise Overdrawn(f"opens more than {self.terms.seats} sequences")
            # Nobody is told of a draft's log-probabilities.
            silent = msgspec.structs.replace(opened.sampling, logprobs=None)
            opened = msgspec.structs.replace(opened, sampling=silent)
            self._held[opened.seq] = _Held(next(numbers), opened)
        self._check_room({})

    def close(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            held = self._held.pop(seq, None)
            if held is None:
                raise ProtocolError(f"sequence {seq} is not open")
            if held.news is None:
                self.closing.append(held.number)

    def leave(self) -> list[int]:
        """Give all up; the numbers that the lane still holds."""
        self.close(list(self._held))
        self.waiting = None
        return self.closing

    # ------------------------------------------------------------ what it asks

    def ask(self, order: Draft) -> None:
        drafts: dict[int, int] = {}
        for item in order.items:
            if item.seq in drafts:
                raise ProtocolError(f"asks twice about sequence {item.seq}")
            drafts[item.seq] = item.k
            self._check(item)
        if order.released or order.arena:
            raise ProtocolError("speaks of memory that is not shared")
        if order.budget is not None and order.budget < 0:
            raise ProtocolError(f"has room for {order.budget} guesses")
        for item in order.items:
            self._held[item.seq].length = item.base_len
        self._check_room(drafts)
        self.waiting = order

    def hurry(self, order: int) -> bool:
        """Want no more guesses of an order than there are; whether it still waited here, and has none now."""
        if self.waiting is None or self.waiting.order != order:
            return False
        news = [msgspec.structs.replace(item, k=0) for item in self.waiting.items]
        self.waiting = msgspec.structs.replace(self.waiting, items=news)
        return True

    def bid(self, *, alone: bool) -> Bid:
        """For what it waits for."""
        assert self.waiting is not None, "only who waits bids"
        items, budget = self.waiting.items, self.waiting.budget
        news = sum(len(item.since) for item in items) + sum(self._untold(item.seq) for item in items)
        longest = max((item.k for item in items if not item.ahead), default=0)
        scarce = budget is not None and sum(item.k for item in items if not item.ahead) > budget
        return Bid(self.identity, max(1.0, work(longest, news)), alone or scarce or news > _LIGHT_NEWS)

    def take(self) -> tuple[list[OpenedSequence], list[DraftItem]]:
        """What the lane must be told, and asked, in the server's numbers; it waits no more."""
        assert self.waiting is not None, "only who waits is served"
        order, self.waiting = self.waiting, None
        opened, items = [], []
        for item in order.items:
            held = self._held.get(item.seq)
            if held is None or held.gen != item.gen:
                continue  # closed since it asked
            if held.news is not None:
                opened.append(held.news)
                held.news = None
            k = 0 if item.ahead else item.k  # what is shared prepares nothing ahead, and only takes the news
            items.append(msgspec.structs.replace(item, seq=held.number, k=k, ahead=[], hypotheses=0))
        return opened, items

    def numbers(self) -> dict[int, int]:
        """The client's own number of each sequence that it holds, by the server's."""
        return {held.number: seq for seq, held in self._held.items()}

    def its(self, drafted: Drafted) -> list[DraftedItem]:
        """Of what the lane answered, what is this client's, in its own numbers."""
        own = self.numbers()
        mine = [item for item in drafted.items if item.seq in own]
        return [msgspec.structs.replace(item, seq=own[item.seq]) for item in mine]

    # ------------------------------------------------------------ checks

    def _untold(self, seq: int) -> int:
        held = self._held.get(seq)
        return len(held.news.tokens) if held is not None and held.news is not None else 0

    def _check(self, item: DraftItem) -> None:
        held = self._held.get(item.seq)
        if held is None or held.gen != item.gen:
            raise ProtocolError(f"sequence {item.seq} of generation {item.gen} is not open")
        keep = item.base_len - len(item.since)
        if not 0 <= keep <= held.length or item.base_len == 0:
            raise ProtocolError(
                f"sequence {item.seq}: base_len {item.base_len} with {len(item.since)} new tokens, "
                f"but {held.length} are held"
            )
        if not 0 <= item.k <= self.terms.k:
            raise ProtocolError(f"sequence {item.seq}: {item.k} guesses asked, of {self.terms.k} at most")
        if item.base_len + item.k > self.terms.max_model_len:
            raise Overdrawn(f"sequence {item.seq} grows beyond {self.terms.max_model_len} tokens")
        if len(item.ahead) > self.terms.k or item.hypotheses < 0:
            raise ProtocolError(
                f"sequence {item.seq}: {len(item.ahead)} tokens ahead, {item.hypotheses} verdicts"
            )
        self._check_tokens(item.since)
        self._check_tokens(item.ahead)
        self._check_rows(item.rows, item.base_len)

    def _check_rows(self, rows: Sequence[HiddenRows], end: int) -> None:
        size, position = self.terms.row_bytes, 0
        for part in rows:
            whole = size > 0 and part.at is None and 0 < part.count == len(part.data) / size
            if not whole or part.start < position or part.start + part.count > end:
                raise ProtocolError(f"hidden rows {part.start} and {part.count} on cannot be")
            position = part.start + part.count

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < (self.terms.vocabulary or _ANY_TOKEN):
            raise ProtocolError(f"a token is not in the vocabulary of {self.terms.vocabulary}")

    def _check_sampling(self, sampling: SamplingSpec) -> None:
        numbers = sampling.temperature, sampling.top_p, sampling.min_p
        possible = (
            all(map(math.isfinite, numbers))
            and 0 <= sampling.temperature <= _MOST_TEMPERATURE
            and 0 < sampling.top_p <= 1
            and 0 <= sampling.min_p <= 1
            and 0 <= sampling.top_k <= _ANY_TOKEN
            and 0 <= sampling.seed < 1 << 63
            and sampling.min_tokens >= 0
        )
        if not possible:
            raise ProtocolError(f"sampling {sampling} cannot be")
        self._check_tokens(sampling.stop_token_ids)
        if (its := sampling.constraints) is not None:
            self._check_tokens(its.allowed_token_ids)
            self._check_tokens(its.end_token_ids)
            self._check_tokens([token for token, _ in its.logit_bias])
            self._check_tokens([token for word in its.bad_words for token in word])

    def _check_room(self, drafts: dict[int, int]) -> None:
        room = self._room
        assert room is not None, "admitted"
        blocks = sum(room.blocks_for(held.length + drafts.get(seq, 0)) for seq, held in self._held.items())
        if blocks > room.blocks:
            raise Overdrawn(f"holds {blocks * room.block} tokens, its share is {room.tokens}")
