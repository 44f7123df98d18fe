"""The target lane: run each sequence's last token and its draft in one pass, sample, judge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ipc.errors import ProtocolError
from ipc.messages import TokenLogprobs, VerifiedItem
from workers.acceptance import accept
from workers.engines.engine import Window
from workers.lane import SequenceTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import OpenedSequence, VerifyItem
    from workers.engines.engine import Draw, Engine, Sample, Served
    from workers.lane import Constrain


class TargetLane:
    def __init__(self, engine: Engine[Any], constrain: Constrain) -> None:
        self.served: Served = engine
        self._engine = engine
        self._sequences = SequenceTable(constrain)

    def open(self, opened: Sequence[OpenedSequence]) -> None:
        for record in opened:
            self._sequences.open(record)
            self._engine.open(record.seq)

    def close(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self._sequences.close(seq)
            self._engine.close(seq)

    def verify(self, items: Sequence[VerifyItem]) -> list[VerifiedItem]:
        """A verdict for each item. Raises ProtocolError for drafts that no embedding can take."""
        windows: list[Window] = []
        draws: list[Draw] = []
        for item in items:
            sequence = self._sequences.advance(item.seq, item.gen, item.base_len, item.since)
            self._check_tokens(item)
            rows = len(item.draft) + 1
            start, run = sequence.window(item.draft, rows)
            windows.append(Window(item.seq, start, run, rows))
            draws += sequence.draws(item.draft, rows)
        samples = self._engine.sample(self._engine.forward(windows), draws)
        verdicts = []
        first = 0
        for item in items:
            end = first + len(item.draft) + 1
            verdicts.append(_judge(item, samples[first:end]))
            first = end
        return verdicts

    def _check_tokens(self, item: VerifyItem) -> None:
        size = self._engine.vocabulary.size
        for token in (*item.since, *item.draft):
            if not 0 <= token < size:
                raise ProtocolError(f"sequence {item.seq}: token {token} is outside the vocabulary of {size}")


def _judge(item: VerifyItem, samples: Sequence[Sample]) -> VerifiedItem:
    n_accepted, next_token = accept(item.draft, [sample.token for sample in samples])
    kept = samples[: n_accepted + 1]
    logprobs = [TokenLogprobs(s.logprob, list(s.top)) for s in kept if s.logprob is not None]
    return VerifiedItem(item.seq, item.gen, item.base_len, n_accepted, next_token, logprobs)
