"""The speculator lane: keep the histories current, ask the speculator for proposals."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ipc import q_rows
from ipc.messages import DraftedItem
from workers.lane import SequenceTable
from workers.pure_sampler import GREEDY_BELOW
from workers.q_placing import QPlacing
from workers.q_row import DrawnFrom
from workers.tensor_plane import TensorPlane
from workers.worth import capacities

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ipc.messages import Acceptance, DraftItem, HiddenRows, OpenedSequence, QForm
    from workers.engines.engine import Served
    from workers.lane import Constrain
    from workers.sequence import LaneSequence


class Ask(NamedTuple):
    """Propose at most `k` tokens after the sequence's committed ones.

    `rows`: hidden rows of committed tokens that are news: the first position and rows [n, features] in
    bfloat16, not to be kept beyond `propose`. `confidences`: where to say how probable each guess is, if that
    is wanted; one who cannot tell does not.
    `drawn_from`: where to draw guesses that are not looked up; None: guess what the target samples, by its
    own noise. What is drawn must not decide over how far the draft goes, nor over its confidence: both follow
    from what it was drawn from, and from the tokens before it.
    """

    sequence: LaneSequence
    k: int
    rows: Sequence[tuple[int, Tensor]] = ()
    confidences: list[float] | None = None
    drawn_from: DrawnFrom | None = None


class Speculator(Protocol):
    """Guesses tokens. A sequence is one object from open to close; its tokens are always committed ones."""

    @property
    def served(self) -> Served:
        """What this speculator runs on, or itself."""
        ...

    def open(self, sequence: LaneSequence) -> None: ...

    def close(self, sequence: LaneSequence) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> Sequence[list[int] | None]:
        """For each ask 0 … k tokens, guesses of what the target will sample; None if there will never be any,
        since what is computed for that sequence are no numbers."""
        ...


class SpeculatorLane:
    def __init__(
        self,
        speculator: Speculator,
        constrain: Constrain | None = None,
        acceptance: Acceptance = "coupled",
        q_form: QForm = "sparse",
    ) -> None:
        self.served = speculator.served
        self._draws = acceptance != "coupled"
        self._q_form: QForm = q_form
        self._speculator = speculator
        self._sequences = SequenceTable(constrain)
        self.plane = TensorPlane()

    def open(self, opened: Sequence[OpenedSequence]) -> None:
        for record in opened:
            self._speculator.open(self._sequences.open(record))

    def close(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            self._speculator.close(self._sequences.close(seq))

    def draft(
        self, items: Sequence[DraftItem], budget: int | None = None, arena: str = ""
    ) -> list[DraftedItem]:
        """Proposals; if there may be more guesses than `budget`, with how many of each are worth it.

        `arena`: of this lane, for large q rows.
        """
        most = sum(item.k for item in items)
        scarce = budget is not None and most > budget
        width = q_rows.width(self._q_form, most, self.served.vocabulary.size, arena=bool(arena))
        placing = QPlacing(self.plane, arena)
        asks = []
        for item in items:
            sequence = self._sequences.advance(item.seq, item.gen, item.base_len, item.since)
            draws = self._draws and sequence.sampling.temperature >= GREEDY_BELOW
            drawn_from = DrawnFrom(width, placing.place) if draws else None
            asks.append(Ask(sequence, item.k, self._rows(item.rows), [] if scarce else None, drawn_from))
        proposals = self._speculator.propose(asks)
        worths: Sequence[int | None] = [None] * len(items)
        if scarce and budget is not None:
            lengths = [len(tokens or ()) for tokens in proposals]
            worths = capacities(lengths, [ask.confidences or () for ask in asks], budget)
        return [
            DraftedItem(
                *(item.seq, item.gen, item.base_len, tokens or []),
                broken=tokens is None,
                worth=worth,
                q=ask.drawn_from.rows if tokens and ask.drawn_from is not None else [],
            )
            for item, ask, tokens, worth in zip(items, asks, proposals, worths, strict=True)
        ]

    def _rows(self, parts: Sequence[HiddenRows]) -> list[tuple[int, Tensor]]:
        found = [(part.start, self.plane.rows(part)) for part in parts]
        return [(start, rows) for start, rows in found if rows is not None]
