"""A sequence as a lane sees it: the committed tokens it was told, and which of them the engine has cached.

A branch of it is a sequence, too: the same, as it would be after a verdict that has not been given yet.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ipc.errors import ProtocolError
from workers.engines.engine import Draw, Window

if TYPE_CHECKING:
    from collections.abc import Iterable
    from collections.abc import Sequence as SequenceOf

    from ipc.messages import OpenedSequence, SamplingSpec
    from workers.constraints import Constraints
    from workers.row_edit import RowEdit


class LaneSequence:
    """Only the coordinator's orders write `tokens`; only the lane's own passes write what is cached."""

    __slots__ = (
        "_agreed",
        "_assumed",
        "_cached",
        "_constraints",
        "gen",
        "prompt_len",
        "sampling",
        "seq",
        "tokens",
    )

    def __init__(self, opened: OpenedSequence, constraints: Constraints | None = None) -> None:
        self.seq = opened.seq
        self.gen = opened.gen
        self.prompt_len = opened.prompt_len
        self.sampling: SamplingSpec = opened.sampling
        self._constraints = constraints
        self.tokens: list[int] = list(opened.tokens)
        self._cached: list[int] = []
        self._agreed = 0  # so many leading tokens are known to be the same in `tokens` and `_cached`
        self._assumed = 0  # so many of the last tokens are not committed

    @property
    def committed(self) -> int:
        """So many tokens, the first ones, are committed; all but in a branch."""
        return len(self.tokens) - self._assumed

    @property
    def unseen(self) -> int:
        """So many of the last tokens the engine has not run yet; all if there is no engine."""
        return len(self.tokens) - self._cached_of(self.tokens, len(self.tokens))

    def branch(self, seq: int, assumed: SequenceOf[int]) -> LaneSequence:
        """The sequence `seq`: this one if `assumed` were committed, too. The engine has to fork it as
        well.
        """
        other = LaneSequence.__new__(LaneSequence)
        other.seq, other.gen, other.prompt_len = seq, self.gen, self.prompt_len
        other.sampling, other._constraints = self.sampling, self._constraints
        other.tokens = [*self.tokens, *assumed]
        other._cached, other._agreed = list(self._cached), self._agreed
        other._assumed = self._assumed + len(assumed)
        return other

    def adopt(self, branch: LaneSequence) -> None:
        """A branch came true, and the engine's own of it was put in the place of this one's."""
        self._cached, self._agreed = branch._cached, min(branch._agreed, len(self.tokens))

    def advance(self, base_len: int, since: SequenceOf[int]) -> None:
        """Make `tokens` the committed history: base_len long, ending in `since`.

        Raises ProtocolError if the lane has not got the tokens before `since`.
        """
        keep = base_len - len(since)
        if not 0 <= keep <= len(self.tokens) or base_len == 0:
            raise ProtocolError(
                f"sequence {self.seq}: base_len {base_len} with {len(since)} new tokens, but the lane has "
                f"{len(self.tokens)}"
            )
        del self.tokens[keep:]
        self.tokens.extend(since)
        self._agreed = min(self._agreed, keep)

    def hold(self, count: int) -> None:
        """The engine has the first `count` tokens of the history from elsewhere."""
        self._cached = self.tokens[:count]
        self._agreed = count

    def draws(self, draft: SequenceOf[int], rows: int) -> list[Draw]:
        """How to sample the last `rows` of what follows the history, and each token of `draft`."""
        end = len(self.tokens) + len(draft) + 1
        edits: Iterable[RowEdit | None] = itertools.repeat(None)
        if self._constraints is not None:
            # They follow committed tokens, which never come back; so what is assumed counts as draft.
            told = self.committed
            edits = self._constraints.edits(self.tokens[:told], [*self.tokens[told:], *draft], rows)
        return [
            Draw(self.sampling, position, position - self.prompt_len, edit)
            for position, edit in zip(range(end - rows, end), edits, strict=False)
        ]

    def window(self, wanted: SequenceOf[int], rows: int, room: int | None = None) -> Window:
        """What to run so that the engine has seen the history and `wanted`, with the last `rows` rows of it.

        Those are always run. What is cached is kept as far as it equals the rest: drafts that were accepted
        are not run again. If more than `room` tokens are missing before the rows (None: no limit), only so
        many are run, and no rows.
        """
        full = [*self.tokens, *wanted] if wanted else self.tokens
        start = self._cached_of(full, len(full) - rows)
        end = len(full)
        if room is not None and end - rows - start > room:
            end, rows = start + room, 0
        run = full[start:end]
        self._cached[start:] = run
        self._agreed = min(end, len(self.tokens))
        return Window(self.seq, start, run, rows)

    def stretch(self, end: int, most: int) -> Window:
        """The next at most `most` tokens of the history, below `end`, that the engine has not seen.

        All of them give rows.
        """
        start = self._cached_of(self.tokens, end)
        run = self.tokens[start : min(end, start + most)]
        if run:
            self._cached[start:] = run
            self._agreed = start + len(run)
        return Window(self.seq, start, run, len(run))

    def _cached_of(self, tokens: SequenceOf[int], most: int) -> int:
        """How many of the first `most` of these tokens are cached."""
        limit = min(len(self._cached), most)
        start = min(self._agreed, limit)
        while start < limit and self._cached[start] == tokens[start]:
            start += 1
        return start
