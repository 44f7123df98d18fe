"""The target lane: run each sequence's last token and its draft in one pass, sample, judge."""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ipc.errors import ProtocolError
from ipc.messages import PendingItem, TokenLogprobs, VerifiedItem
from workers.acceptance import accept
from workers.engines.tap import Tap, Tapped
from workers.lane import SequenceTable
from workers.prompt_scores import score_prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import OpenedSequence, VerifyItem
    from workers.engines.engine import Draw, Engine, Sample, Served, Window
    from workers.lane import Constrain


class TargetLane:
    def __init__(self, engine: Engine[Any], constrain: Constrain | None) -> None:
        self.served: Served = engine
        self._engine = engine
        self._sequences = SequenceTable(constrain)

    def open(self, opened: Sequence[OpenedSequence]) -> None:
        for record in opened:
            sequence = self._sequences.open(record)
            # What is known of a prompt already gives no rows, so log-probabilities of it want it run anew.
            known = record.tokens if record.sampling.prompt_logprobs is None else ()
            sequence.hold(self._engine.open(record.seq, known))

    def close(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self._sequences.close(seq)
            self._engine.close(seq)

    def verify(
        self, items: Sequence[VerifyItem], prefill: int, taps: Sequence[int] = ()
    ) -> tuple[list[VerifiedItem], list[PendingItem]]:
        """A verdict for each item, but for those whose history takes more than is left of `prefill` tokens.

        Of these, as much is run as is left. `taps`: layers after which the hidden rows are taken that items
        want. Raises ProtocolError for drafts that no embedding can take.
        """
        windows: list[Window] = []
        draws: list[Draw] = []
        judged: list[VerifyItem] = []
        pending: list[PendingItem] = []
        scores: dict[int, list[TokenLogprobs]] = {}
        tap = _tap(items, taps)
        for item in items:
            sequence = self._sequences.advance(item.seq, item.gen, item.base_len, item.since)
            self._check_tokens(item)
            if item.prompt_since is not None:
                run = partial(self._forward, tap=tap)
                scored = score_prompt(sequence, item.prompt_since, prefill, self._engine, run)
                scores[item.seq] = scored.entries
                prefill -= scored.ran
            window = sequence.window(item.draft, len(item.draft) + 1, prefill)
            prefill -= len(window.tokens) - window.rows
            if window.rows == 0:
                pending.append(PendingItem(item.seq, item.gen, window.start + len(window.tokens)))
            else:
                judged.append(item)
                draws += sequence.draws(item.draft, window.rows)
            if window.tokens:
                windows.append(window)
        samples = iter(self._engine.sample(self._forward(windows, tap), draws))
        verdicts = [_judge(item, list(islice(samples, len(item.draft) + 1)), tap) for item in judged]
        if tap is not None:
            pending = [structs.replace(item, rows=tap.rows(item.seq, item.held)) for item in pending]
        if scores:
            verdicts = [structs.replace(item, prompt_logprobs=scores.get(item.seq, [])) for item in verdicts]
            pending = [structs.replace(item, prompt_logprobs=scores.get(item.seq, [])) for item in pending]
        return verdicts, pending

    def _forward(self, windows: Sequence[Window], tap: Tap | None) -> Any:
        """Logit rows. Raises ProtocolError if this engine cannot show the hidden rows that are wanted."""
        engine = self._engine
        if tap is None:
            return engine.forward(windows)
        if not isinstance(engine, Tapped):
            raise ProtocolError("this engine shows no hidden rows; use native for speculators that read them")
        if not all(0 < layer <= engine.layers for layer in tap.layers):
            raise ProtocolError(f"hidden rows after layers {list(tap.layers)} of {engine.layers}")
        return engine.forward(windows, tap)

    def _check_tokens(self, item: VerifyItem) -> None:
        size = self._engine.vocabulary.size
        for token in (*item.since, *item.draft):
            if not 0 <= token < size:
                raise ProtocolError(f"sequence {item.seq}: token {token} is outside the vocabulary of {size}")


def _tap(items: Sequence[VerifyItem], taps: Sequence[int]) -> Tap | None:
    """For the hidden rows that items want, if any does."""
    since = {item.seq: item.rows_since for item in items if item.rows_since is not None}
    return Tap(taps, since) if since else None


def _judge(item: VerifyItem, samples: Sequence[Sample], tap: Tap | None) -> VerifiedItem:
    n_accepted, next_token = accept(item.draft, [sample.token for sample in samples])
    kept = samples[: n_accepted + 1]
    logprobs = [TokenLogprobs(s.logprob, list(s.top)) for s in kept if s.logprob is not None]
    rows = tap.rows(item.seq, item.base_len + n_accepted) if tap is not None else []
    return VerifiedItem(item.seq, item.gen, item.base_len, n_accepted, next_token, logprobs, rows)
