"""Head and lookups in one draft, judged by rejection: distributed as the target's own, to 1e-9.

Which of them guesses, and where the draft ends, hangs on what the head would draw from, not on what it drew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from integral import Integral
from toy_rounds import Rounds, error

from ipc.messages import HeadSpec, HiddenRows, LaneSpec, Vocabulary
from ipc.q_rows import LOOKED_UP
from ipc.toy import ToyParameters
from workers import noise
from workers.engines.toy import ToyModel
from workers.speculators import cascade, proposals
from workers.speculators.cascade import CascadeSpeculator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.speculators.head import Entry

EXACT, SEEN = 1e-9, 1e-5
SIZE, K = 4, 3
PROMPT = [0, 3, 1, 3, 0, 3, 1, 3, 2, 0]
"""So that a lookup has something to say after some of the guesses."""


class TableContext:
    nbytes = 8
    end = 0

    def keep(self) -> None: ...

    def clear(self) -> None: ...

    def drop_drafts(self) -> None: ...


class TableHead:
    """A head whose logits hang on the last token only. After some it is surer than after others."""

    window, row_bytes = 4, 2
    tokens = torch.arange(SIZE)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._model = ToyModel(ToyParameters(vocabulary=SIZE, order=1, seed=5))

    def context(self) -> TableContext:
        return TableContext()

    def fuse(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(rows), 1)

    def absorb(self, *_: Any) -> None: ...

    def step(self, entries: Sequence[Entry]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = [self._model.logits(self._model.state([entry.token])) for entry in entries]
        flat = torch.tensor([[50.0 if entry.token == 3 else 2.0] for entry in entries])
        return torch.stack([entry.row for entry in entries]), torch.tensor(logits) / flat


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def rounds(monkeypatch):
    """`rounds(engine, rule)`."""
    monkeypatch.setattr(cascade, "Head", TableHead)
    monkeypatch.setattr(proposals, "LEAST_REACH", 0.06)
    monkeypatch.setattr(cascade.vocabulary, "read", lambda _: Vocabulary(SIZE, ""))

    def make(engine: Any, rule: Any) -> Rounds:
        head = HeadSpec("", (1,), TableHead.row_bytes, TableHead.window)
        spec = LaneSpec("speculator", engine, "", "fp32", "cpu", 1, 4, 64, K, head=head)
        speculator = CascadeSpeculator(spec)
        # What is learned from one run of the enumeration must not change the next.
        monkeypatch.setattr(speculator._judge, "learn", lambda sequence: None)
        made = Rounds(rule, SIZE, K, speculator=speculator, prompt=PROMPT, temperature=1.2)
        made.rows = lambda length: [HiddenRows(0, length - 1, bytes(2 * (length - 1)))]
        return made

    return make


def drafts_of(rounds: Rounds) -> dict[Any, float]:
    """Drafts by tokens and whether each was drawn."""
    real = rounds.draft
    seen: list[Any] = []

    def watched(item: Any) -> Any:
        tokens, q = real(item)
        seen.append((tuple(tokens), tuple(row != LOOKED_UP for row in q)))
        return tokens, q

    rounds.drafts = watched

    def run() -> Any:
        rounds.write(K + 1, 1)
        return seen[-1]

    try:
        return Integral().of(run)
    finally:
        rounds.drafts = real


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("engine", ["eagle", "cascade"])
def test_head_and_lookups_change_no_distribution(rounds, engine, rule):
    made = rounds(engine, rule)
    drafts = drafts_of(made)
    ways = {drawn for _, drawn in drafts}
    assert any(any(drawn) for drawn in ways)
    assert any(not all(drawn) for drawn in ways) == (engine == "cascade")
    assert len({len(tokens) for tokens, _ in drafts}) > 1  # some end early
    assert error(made, K + 1) < EXACT


def test_the_source_and_the_end_follow_from_the_tokens_before(rounds):
    made = rounds("cascade", "rejection")
    decided: dict[tuple[int, ...], set[Any]] = {}
    for tokens, drawn in drafts_of(made):
        for i in range(K):
            decided.setdefault(tokens[:i], set()).add(drawn[i] if i < len(tokens) else "end")
    assert all(len(ways) == 1 for ways in decided.values())


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_head_that_looks_at_what_it_drew_would_be_seen(rounds, rule, monkeypatch):
    """As for coupled acceptance, where it is allowed: a guess is as promising as its token is likely."""
    real = CascadeSpeculator._undrawn

    def eager(self: Any, chain: Any, *others: Any) -> proposals.Proposal:
        lazy = real(self, chain, *others)
        depth = len(chain.draft.tokens)
        position = len(chain.sequence.tokens) + depth
        token = lazy.q.pick(noise.fraction(0, position, noise.DRAFT, depth))
        return lazy._replace(expected=lazy.q.probability(token))

    monkeypatch.setattr(CascadeSpeculator, "_undrawn", eager)
    assert error(rounds("cascade", rule), K + 1) > SEEN
