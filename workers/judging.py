"""Rows of the target and drafts to judgements, by the rule that the lane was told.

The rules themselves are pure: `workers.acceptance` and `workers.rejection`. This file knows which rows and
which noise belong to which draft token, and no wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ipc.errors import ProtocolError
from ipc.q_rows import LOOKED_UP
from workers import noise, rejection
from workers.acceptance import accept
from workers.engines.engine import Sample
from workers.pure_sampler import GREEDY_BELOW
from workers.q_row import Q

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import Acceptance, VerifyItem
    from workers.distribution import Distribution
    from workers.engines.engine import Draw, Engine


class Judgement(NamedTuple):
    """So many tokens of a draft stand; `samples` are these and the one that comes next."""

    n_accepted: int
    samples: list[Sample]


class Judging:
    def __init__(self, engine: Engine[Any], acceptance: Acceptance | None) -> None:
        """`acceptance` None: the rank is not the one that judges, and has no rows to judge by."""
        self._engine = engine
        self._acceptance = acceptance
        self._coupled = acceptance in ("coupled", None)

    def check(self, item: VerifyItem) -> None:
        """Raises ProtocolError for q rows that do not belong to the draft. What they hold was checked where
        they came from."""
        if len(item.q) not in (0, len(item.draft)):
            raise ProtocolError(
                f"sequence {item.seq}: {len(item.q)} q rows for {len(item.draft)} draft tokens"
            )
        if item.q and self._acceptance == "coupled":
            raise ProtocolError(f"sequence {item.seq}: q rows, but acceptance is coupled")

    def judge(self, rows: Any, items: Sequence[VerifyItem], draws: Sequence[Draw]) -> list[Judgement]:
        """`rows` and `draws`: for each item in turn, one after its history and one after each draft token."""
        if self._coupled:
            samples = self._engine.sample(rows, draws)
        judgements = []
        first = 0
        for item in items:
            end = first + len(item.draft) + 1
            if self._coupled:
                judgements.append(_coupled(item, samples[first:end]))
            elif not item.draft or draws[first].sampling.temperature < GREEDY_BELOW:
                judgements.append(_coupled(item, self._engine.sample(rows[first:end], draws[first:end])))
            else:
                judgements.append(self._by_rejection(item, rows[first:end], draws[first:end]))
            first = end
        return judgements

    def _by_rejection(self, item: VerifyItem, rows: Any, draws: Sequence[Draw]) -> Judgement:
        engine = self._engine

        def target(index: int) -> Distribution:
            return engine.distribution(rows, index, draws[index])

        def fraction(index: int, purpose: int = noise.ACCEPT) -> float:
            how = draws[index]
            return noise.fraction(how.sampling.seed, how.position, purpose, index)

        q_rows = item.q or [LOOKED_UP] * len(item.draft)
        assert self._acceptance is not None, "ranks that do not judge have no rows"
        qs = [Q.of(row, token) for row, token in zip(q_rows, item.draft, strict=True)]
        n, reach = rejection.judge(self._acceptance, item.draft, qs, target, fraction)
        stood = [self._sample(rows, i, token, draws[i]) for i, token in enumerate(item.draft[:n])]
        if n == len(item.draft):
            return Judgement(n, [*stood, *engine.sample(rows[n:], draws[n:])])
        token = target(n).beyond(qs[n], reach, fraction(n, noise.RECOVER))
        return Judgement(n, [*stood, self._sample(rows, n, token, draws[n])])

    def _sample(self, rows: Any, index: int, token: int, draw: Draw) -> Sample:
        """A token that `engine.sample` did not draw, as it would say it."""
        alternatives = draw.sampling.logprobs
        if alternatives is None:
            return Sample(token)
        (score,) = self._engine.scores(rows[index : index + 1], [token], alternatives)
        return Sample(token, score.logprob, score.top)


def _coupled(item: VerifyItem, samples: Sequence[Sample]) -> Judgement:
    n_accepted, _ = accept(item.draft, [sample.token for sample in samples])
    return Judgement(n_accepted, list(samples[: n_accepted + 1]))
