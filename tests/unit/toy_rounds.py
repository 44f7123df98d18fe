"""Rounds of draft and verify between two lanes in this process, over the wire's frames, of one sequence.

The lanes are what a worker makes of a spec; only what the coordinator does is done here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from draws import NEUTRAL
from integral import Integral

from ipc import q_rows
from ipc.codec import decode_fact, decode_order, encode
from ipc.messages import (
    ConstraintSpec,
    Draft,
    Drafted,
    DraftItem,
    HiddenRows,
    LaneSpec,
    OpenedSequence,
    SamplingSpec,
    VerifiedItem,
    Verify,
    VerifyItem,
)
from workers.constraints import Constraints
from workers.engines.toy import ToyEngine
from workers.sampler import Sampler
from workers.speculator import SpeculatorLane
from workers.speculators.draft import DraftSpeculator
from workers.target import TargetLane

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.engines.engine import Draw, Sample
    from workers.tensor_distribution import TensorDistribution

PROMPT = [1, 2]
FREE = ConstraintSpec(0.0, 0.0, 1.0, (), (), (), "", ())


class TensorToy(ToyEngine):
    """The toy's logits, through the sampler of engines that have tensors."""

    def __init__(self, spec: LaneSpec) -> None:
        super().__init__(spec)
        self._sampler = Sampler(self.model.size, "cpu")

    def _tensor(self, rows: Sequence[int]) -> torch.Tensor:
        return torch.tensor([self.model.logits(state) for state in rows])

    def sample(self, rows: Sequence[int], draws: Sequence[Draw]) -> list[Sample]:
        return self._sampler.sample(self._tensor(rows), draws)

    def distribution(self, rows: Sequence[int], index: int, draw: Draw) -> TensorDistribution:
        return self._sampler.distribution(self._tensor(rows)[index], draw, index)


class Looked:
    """A speculator that always guesses as its table says; nothing is drawn."""

    def __init__(self, engine: ToyEngine) -> None:
        self.served = engine

    def open(self, sequence: Any) -> None: ...

    def close(self, sequence: Any) -> None: ...

    def observe(self, news: Any) -> None: ...

    def room(self, length: int) -> int:
        return 1 << 20

    def propose(self, asks: Sequence[Any], cancelled: Any = None) -> list[list[int]]:
        size = self.served.vocabulary.size
        return [[(ask.sequence.tokens[-1] + 2 * i) % size for i in range(ask.k)] for ask in asks]


class Rounds:
    def __init__(
        self,
        acceptance: Any,
        size: int,
        k: int,
        *,
        engine: type[ToyEngine] = ToyEngine,
        looks_up: bool = False,
        speculator: Any = None,
        q_form: Any = "sparse",
        constraints: ConstraintSpec | None = None,
        agree: float = 0.0,
        prompt: list[int] | None = None,
        **sampling: Any,
    ) -> None:
        """`size`: of the vocabulary. `agree`: in so many contexts the speculator's model is the target's."""
        self.size = size
        self.k = k
        self.spec = SamplingSpec(**{**NEUTRAL, "temperature": 0.8, **sampling}, constraints=constraints)
        self.rows: Callable[[int], list[HiddenRows]] = lambda length: []
        self.prompt = prompt or PROMPT
        self.drafts: Callable[[DraftItem], tuple[list[int], list[Any]]] = self.draft
        constrain = lambda opened: Constraints(  # noqa: E731
            opened.sampling.constraints, opened.sampling, opened.prompt_len, size, None
        )
        toy = LaneSpec("target", "toy", f"vocabulary={size},order=2", "fp32", "cpu", 1, 4, 64)
        guesser = engine(LaneSpec("speculator", "toy", f"{toy.model},agree={agree}", "fp32", "cpu", 1, 4, 64))
        if speculator is None:
            speculator = Looked(guesser) if looks_up else DraftSpeculator(guesser)
        self.speculator = SpeculatorLane(speculator, constrain, acceptance, q_form)
        self.engine = engine(toy)
        self.target = TargetLane(self.engine, constrain, acceptance)
        self.open(self.speculator)
        self.open(self.target)

    def open(self, lane: SpeculatorLane | TargetLane, **changes: Any) -> None:
        """Tell a lane of the prompt, with another sampling perhaps."""
        fields = {name: getattr(self.spec, name) for name in self.spec.__struct_fields__}
        spec = SamplingSpec(**(fields | changes))
        lane.open([OpenedSequence(0, 0, self.prompt, len(self.prompt), spec)])

    def draft(self, item: DraftItem) -> tuple[list[int], list[Any]]:
        """Tokens of a draft and what they were drawn from."""
        order: Any = decode_order(encode(Draft("e", 1, [item])))
        items = self.speculator.draft(order.items)
        for its in items:
            its.tokens[:] = map(int, its.tokens)  # an encoder does not look at them, see Later
        drafted: Any = decode_fact(encode(Drafted("e", 1, items, 0)))
        (answer,) = drafted.items
        for row, token in zip(answer.q, answer.tokens, strict=False):
            assert not q_rows.fault(row, token, self.size)
        return answer.tokens, answer.q

    def verify(self, item: VerifyItem) -> VerifiedItem:
        order: Any = decode_order(encode(Verify("e", 1, [item])))
        ((verdict,), _) = self.target.verify(order.items, order.prefill)
        return verdict

    def write(self, length: int, rounds: int | None = None) -> tuple[int, ...]:
        """What is committed after so many rounds (None: as many as it takes), `length` tokens at most."""
        tokens = list(self.prompt)
        known, end = len(tokens), len(tokens) + length
        while len(tokens) < end and rounds != 0:
            k = min(self.k, end - len(tokens))
            since, known = tokens[known:], len(tokens)
            item = DraftItem(0, 0, len(tokens), since, k, self.rows(len(tokens)))
            draft, q = self.drafts(item) if k else ([], [])
            verdict = self.verify(VerifyItem(0, 0, len(tokens), since, draft, q=q))
            tokens += [*draft[: verdict.n_accepted], int(verdict.next_token)]
            rounds = None if rounds is None else rounds - 1
        return tuple(tokens[len(self.prompt) : end])


def plain(rounds: Rounds, length: int) -> dict[tuple[int, ...], float]:
    """How the target distributes texts of this length, one token a round and without drafts."""
    with mock.patch.object(rounds, "k", 0):
        return Integral().of(lambda: rounds.write(length))


def completed(
    outcomes: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float], length: int
) -> dict[tuple[int, ...], float]:
    """Outcomes of any length, each continued by what the target says after it."""
    mass = [
        {
            start: sum(p for text, p in wanted.items() if text[:n] == start)
            for start in {t[:n] for t in wanted}
        }
        for n in range(length + 1)
    ]
    found = dict.fromkeys(wanted, 0.0)
    for start, chance in outcomes.items():
        for text, p in wanted.items():
            if text[: len(start)] == start:
                found[text] += chance * p / mass[len(start)][start]
    return found


def error(rounds: Rounds, length: int, count: int | None = 1, integral: Integral | None = None) -> float:
    """The largest difference of a text's probability, after one round or until all is written."""
    wanted = plain(rounds, length)
    outcomes = (integral or Integral()).of(lambda: rounds.write(length, count))
    assert abs(sum(outcomes.values()) - 1.0) < 1e-9
    stray = sum(p for text, p in outcomes.items() if not any(t[: len(text)] == text for t in wanted))
    return max(stray, max(abs(found - wanted[t]) for t, found in completed(outcomes, wanted, length).items()))
