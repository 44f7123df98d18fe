"""The target lane: run each sequence's last token and its draft in one pass, then judge."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import structs

from ipc import q_rows
from ipc.errors import ProtocolError
from ipc.messages import LAST_NORM, PendingItem, TokenLogprobs, VerifiedItem
from ipc.q_rows import LOOKED_UP
from workers.engines.tap import Tap, Tapped
from workers.judging import Judging
from workers.lane import SequenceTable
from workers.prompt_scores import score_prompt
from workers.tensor_plane import TensorPlane

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import Acceptance, OpenedSequence, VerifyItem
    from workers.engines.engine import Draw, Engine, Served, Window
    from workers.engines.tap import Pack
    from workers.judging import Judgement
    from workers.lane import Constrain


class TargetLane:
    def __init__(
        self, engine: Engine[Any], constrain: Constrain | None, acceptance: Acceptance | None = "coupled"
    ) -> None:
        """`acceptance`: see Judging."""
        self.served: Served = engine
        self._acceptance = acceptance
        self._judging = Judging(engine, acceptance)
        self._engine = engine
        self._sequences = SequenceTable(constrain)
        self.plane = TensorPlane()

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
        self, items: Sequence[VerifyItem], prefill: int, taps: Sequence[int] = (), arena: str = ""
    ) -> tuple[list[VerifiedItem], list[PendingItem]]:
        """A verdict for each item, but for those whose history takes more than is left of `prefill` tokens.

        Of these, as much is run as is left. `taps`: layers after which the hidden rows are taken that items
        want; `arena`: where they are put. Raises ProtocolError for drafts that no embedding can take.
        """
        windows: list[Window] = []
        draws: list[Draw] = []
        judged: list[VerifyItem] = []
        pending: list[PendingItem] = []
        scores: dict[int, list[TokenLogprobs]] = {}
        tap = _tap(items, taps, lambda start, rows: self.plane.pack_rows(start, rows, arena))
        size = self._engine.vocabulary.size
        for item in map(self._with_q, items):
            sequence = self._sequences.advance(item.seq, item.gen, item.base_len, item.since)
            self._check_draft(item, size)
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
        judgements = self._judging.judge(self._forward(windows, tap), judged, draws)
        verdicts = [_verdict(*pair, tap) for pair in zip(judged, judgements, strict=True)]
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
        if not all(LAST_NORM <= layer <= engine.layers for layer in tap.layers):
            raise ProtocolError(f"hidden rows after layers {list(tap.layers)} of {engine.layers}")
        return engine.forward(windows, tap)

    def _with_q(self, item: VerifyItem) -> VerifyItem:
        """The item with the q rows that lie in an arena. What cannot be had is left out: see Judging."""
        if self._acceptance is None:
            return structs.replace(item, q=[])
        if all(row.at is None for row in item.q):
            return item
        size = self._engine.vocabulary.size
        found = []
        for row, token in zip(item.q, item.draft, strict=False):
            read = self.plane.q(row)
            found.append(read if read is not None and not q_rows.fault(read, token, size) else LOOKED_UP)
        return structs.replace(item, q=found)

    def _check_draft(self, item: VerifyItem, size: int) -> None:
        for token in (*item.since, *item.draft):
            if not 0 <= token < size:
                raise ProtocolError(f"sequence {item.seq}: token {token} is outside the vocabulary of {size}")
        self._judging.check(item)


def _tap(items: Sequence[VerifyItem], taps: Sequence[int], pack: Pack) -> Tap | None:
    """For the hidden rows that items want, if any does."""
    since = {item.seq: item.rows_since for item in items if item.rows_since is not None}
    return Tap(taps, since, pack) if since else None


def _verdict(item: VerifyItem, judgement: Judgement, tap: Tap | None) -> VerifiedItem:
    n_accepted, samples = judgement
    next_token = samples[-1].token
    logprobs = [TokenLogprobs(s.logprob, list(s.top)) for s in samples if s.logprob is not None]
    rows = tap.rows(item.seq, item.base_len + n_accepted) if tap is not None else []
    return VerifiedItem(item.seq, item.gen, item.base_len, n_accepted, next_token, logprobs, rows)
