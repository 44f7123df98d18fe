"""The speculator lane: keep the histories current, ask the speculator for proposals.

For drafts that are being verified, a step from the end of each comes first, by which verdicts are guessed.
Then come, all in one batch, a draft for each of those verdicts and those of sequences that wait for one.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ipc import q_rows
from ipc.messages import DraftedItem, Prepared
from workers.branches import Branches, Trail
from workers.lane import SequenceTable
from workers.pure_sampler import GREEDY_BELOW
from workers.q_placing import QPlacing
from workers.q_row import DrawnFrom
from workers.tensor_plane import TensorPlane
from workers.worth import capacities

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ipc.messages import Acceptance, DraftItem, HiddenRows, OpenedSequence, QForm, QRow
    from workers.branches import Branch
    from workers.engines.engine import Served
    from workers.lane import Constrain
    from workers.sequence import LaneSequence


def never() -> bool:
    """Nobody is in a hurry."""
    return False


class Ask(NamedTuple):
    """Propose at most `k` tokens after the sequence's own.

    `confidences`: where to say how probable each guess is, if that is wanted; one who cannot tell does not.
    `drawn_from`: where to draw guesses that are not looked up; None: guess what the target samples, by its
    own noise. What is drawn must not decide over how far the draft goes, nor over its confidence: both follow
    from what it was drawn from, and from the tokens before it.
    `others`: where to name, for each guess, some tokens that are less likely, best first; of more than
    ALTERNATIVES no use is made.
    """

    sequence: LaneSequence
    k: int
    confidences: list[float] | None = None
    drawn_from: DrawnFrom | None = None
    others: list[list[int]] | None = None


class News(NamedTuple):
    """What may have grown. `rows`: hidden rows of the target that are new, each part a first position and
    rows [n, features] in bfloat16, not to be kept."""

    sequence: LaneSequence
    rows: Sequence[tuple[int, Tensor]] = ()


class Outlook(NamedTuple):
    """A verdict that may come on an item's draft: the branch in which it has, and what is asked there."""

    item: DraftItem
    branch: Branch
    ask: Ask


class Speculator(Protocol):
    """Guesses tokens. A sequence is one object from open to close; but for branches, its tokens are committed
    ones."""

    prefers_fresh: bool
    """Whether it drafts better after what the target has run than in a branch; its confidences then say how
    good a draft is, and cost nothing."""

    @property
    def served(self) -> Served:
        """What this speculator runs on, or itself."""
        ...

    def open(self, sequence: LaneSequence) -> None: ...

    def close(self, sequence: LaneSequence) -> None:
        """Forget a sequence or a branch."""
        ...

    def fork(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        """Open a branch, which begins like the sequence."""
        ...

    def adopt(self, sequence: LaneSequence, branch: LaneSequence) -> None:
        """A branch came true: what is held of it is the sequence's now. The branch is no more."""
        ...

    def room(self, length: int) -> int:
        """How many branches could be forked that grow by so many tokens."""
        ...

    def observe(self, news: Sequence[News]) -> None:
        """What is committed of these sequences may have grown."""
        ...

    def propose(
        self, asks: Sequence[Ask], cancelled: Callable[[], bool] = never
    ) -> Sequence[list[int] | None]:
        """For each ask 0 … k tokens, guesses of what the target will sample; None if there will never be any,
        since what is computed for that sequence are no numbers. Once `cancelled`, what there is."""
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
        self._branches = Branches(speculator)
        self._drawing: Callable[[], DrawnFrom]
        self.plane = TensorPlane()

    def open(self, opened: Sequence[OpenedSequence]) -> None:
        for record in opened:
            self._speculator.open(self._sequences.open(record))

    def close(self, seqs: Sequence[int]) -> None:
        for seq in seqs:
            sequence = self._sequences.close(seq)
            self._branches.close(sequence)
            self._speculator.close(sequence)

    def draft(
        self,
        items: Sequence[DraftItem],
        budget: int | None = None,
        arena: str = "",
        cancelled: Callable[[], bool] = never,
    ) -> list[DraftedItem]:
        """Proposals; if there may be more guesses than `budget`, with how many of each are worth it.

        `arena`: of this lane, for large q rows.
        """
        sequences = {}
        news = []
        for item in items:
            sequence = sequences[item.seq] = self._sequences.advance(
                item.seq, item.gen, item.base_len, item.since
            )
            self._branches.settle(sequence)
            news.append(News(sequence, self._rows(item.rows)))
        self._speculator.observe(news)
        # Branches stand in memory that sequences may need: then all of them go.
        growth = max((sequences[item.seq].unseen + item.k for item in items if not item.ahead), default=0)
        if growth and self._speculator.room(growth) <= 0:
            self._branches.give_up()
        most = sum(item.k * max(1, item.hypotheses) for item in items)
        width = q_rows.width(self._q_form, most, self.served.vocabulary.size, arena=bool(arena))
        self._drawing = partial(DrawnFrom, width, QPlacing(self.plane, arena).place)
        waiting = [item for item in items if not item.ahead]
        verified = [item for item in items if item.ahead]
        scarce = budget is not None and sum(item.k for item in waiting) > budget
        asks = [self._ask(sequences[item.seq], item.k, item.hypotheses, scarce=scarce) for item in waiting]
        branches, broken = self._guess_verdicts(verified, waiting, sequences, cancelled)
        proposals = self._speculator.propose([*asks, *(branch.ask for branch in branches)], cancelled)
        answers = self._drafted(waiting, asks, proposals[: len(asks)], budget if scarce else None)
        return answers + self._prepared(verified, branches, proposals[len(asks) :], broken)

    def _drafted(
        self,
        items: Sequence[DraftItem],
        asks: Sequence[Ask],
        proposals: Sequence[list[int] | None],
        budget: int | None,
    ) -> list[DraftedItem]:
        worths: Sequence[int | None] = [None] * len(items)
        if budget is not None:
            lengths = [len(tokens or ()) for tokens in proposals]
            worths = capacities(lengths, [ask.confidences or () for ask in asks], budget)
        answers = []
        for item, ask, tokens, worth in zip(items, asks, proposals, worths, strict=True):
            if item.hypotheses:
                self._branches.drafted(ask.sequence, _trail(ask, tokens))
            answers.append(
                DraftedItem(
                    *(item.seq, item.gen, item.base_len, tokens or []),
                    broken=tokens is None,
                    worth=worth,
                    q=self._q(ask, tokens),
                    expected=self._expected(ask) if item.hypotheses else None,
                )
            )
        return answers

    def _guess_verdicts(
        self,
        items: Sequence[DraftItem],
        waiting: Sequence[DraftItem],
        sequences: dict[int, LaneSequence],
        cancelled: Callable[[], bool],
    ) -> tuple[list[Outlook], set[int]]:
        """A branch for each verdict that is likely, of so many as there is memory for beside the drafts of
        those that are `waiting`; and the sequences whose logits are no numbers."""
        if not items:
            return [], set()
        growth = max(sequences[item.seq].unseen + len(item.ahead) + 1 + item.k for item in (*items, *waiting))
        room = self._speculator.room(growth) - len(items) - len(waiting)
        known = {item.seq: self._branches.begin(sequences[item.seq], item.ahead) for item in items}
        ends: dict[int, Branch] = {}
        if room > 0:
            ends = {
                item.seq: self._branches.fork(sequences[item.seq], item.ahead)
                for item in items
                if not known[item.seq][1]
            }
        asks = [Ask(end.sequence, 1, others=[]) for end in ends.values()]
        broken = set()
        for seq, ask, tokens in zip(ends, asks, self._speculator.propose(asks, cancelled), strict=True):
            if tokens is None:
                broken.add(seq)
            elif tokens:
                known[seq] = known[seq][0], [tokens[0], *(ask.others or [[]])[0]]
        outlooks: list[Outlook] = []
        for index, item in enumerate(items):
            # Where there is not room for all, each gets its share: a round waits for all drafts.
            share = max(0, room) // (len(items) - index)
            count = 0 if cancelled() else min(item.hypotheses, share)
            for n_accepted, next_token in self._branches.likeliest(item.ahead, *known[item.seq], count):
                assumed = [*item.ahead[:n_accepted], next_token]
                end = ends.get(item.seq) if n_accepted == len(item.ahead) else None
                source = end.sequence if end is not None else None
                branch = self._branches.fork(sequences[item.seq], assumed, source)
                room -= 1
                ask = self._ask(branch.sequence, item.k, item.hypotheses)
                outlooks.append(Outlook(item, branch, ask))
        for seq, end in ends.items():
            self._branches.drop(sequences[seq], end)
        return outlooks, broken

    def _prepared(
        self,
        items: Sequence[DraftItem],
        outlooks: Sequence[Outlook],
        proposals: Sequence[list[int] | None],
        broken: set[int],
    ) -> list[DraftedItem]:
        """`broken` as in `_guess_verdicts`."""
        prepared: dict[int, list[Prepared]] = {item.seq: [] for item in items}
        for (item, branch, ask), tokens in zip(outlooks, proposals, strict=True):
            branch.trail = _trail(ask, tokens)
            if tokens is None:
                broken.add(item.seq)
            elif tokens:
                *stood, next_token = branch.assumed
                draft = tokens, self._q(ask, tokens), self._expected(ask)
                prepared[item.seq].append(Prepared(len(stood), next_token, *draft))
        return [
            DraftedItem(
                *(item.seq, item.gen, item.base_len, []),
                broken=item.seq in broken,
                prepared=prepared[item.seq],
            )
            for item in items
        ]

    def _rows(self, parts: Sequence[HiddenRows]) -> list[tuple[int, Tensor]]:
        found = [(part.start, self.plane.rows(part)) for part in parts]
        return [(start, rows) for start, rows in found if rows is not None]

    def _q(self, ask: Ask, tokens: list[int] | None) -> list[QRow]:
        """What the tokens were drawn from. Where a draft broke off, nobody will hear of its rows."""
        rows = ask.drawn_from.rows if ask.drawn_from is not None else []
        if tokens:
            return rows
        self.plane.release([row.at.ref for row in rows if row.at is not None])
        return []

    def _expected(self, ask: Ask) -> float | None:
        """How many of the guesses should stand: the sum of the chances that the target gets to each.

        Of guesses that are drawn it is not said: it hangs on what was drawn, which must not decide whether
        the draft is used.
        """
        if not self._speculator.prefers_fresh or ask.confidences is None or ask.drawn_from is not None:
            return None
        return float(sum(accumulate(ask.confidences, mul)))

    def _ask(self, sequence: LaneSequence, k: int, hypotheses: int, *, scarce: bool = False) -> Ask:
        draws = self._draws and sequence.sampling.temperature >= GREEDY_BELOW
        return Ask(
            sequence,
            k,
            [] if scarce or (hypotheses and self._speculator.prefers_fresh) else None,
            self._drawing() if draws else None,
            [] if hypotheses > 1 else None,
        )


def _trail(ask: Ask, tokens: list[int] | None) -> Trail:
    return Trail(len(ask.sequence.tokens), tokens or [], ask.others or [])
