"""Rejection over the native engine: what a model drafts of itself always stands. Its rows have the same bits
in the steps of a draft and in the pass that verifies it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from small_models import lane, save

from ipc import q_rows
from ipc.messages import DraftItem, OpenedSequence, SamplingSpec, VerifyItem
from workers.engines.native import NativeEngine
from workers.lifecycle import made_ready
from workers.speculator import SpeculatorLane
from workers.speculators.draft import DraftSpeculator
from workers.target import TargetLane

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SIZE, K, ROUNDS = 211, 4, 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("model"), "llama, tied")


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
@pytest.mark.parametrize("filtered", [{}, {"top_p": 0.9, "top_k": 150}])
def test_what_a_model_drafts_of_itself_stands(model, acceptance, filtered):
    def never(_: Any) -> Any:
        raise AssertionError("nothing is constrained")

    made = [made_ready(NativeEngine(lane(model))) for _ in range(2)]
    speculator = SpeculatorLane(DraftSpeculator(made[0]), never, acceptance, "full")
    target = TargetLane(made[1], never, acceptance)
    fields = {"temperature": 0.9, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": 4, "min_tokens": 0}
    sampling = SamplingSpec(**(fields | filtered), stop_token_ids=(), logprobs=1)
    opened = [OpenedSequence(0, 0, PROMPT, len(PROMPT), sampling)]
    speculator.open(opened)
    target.open(opened)
    tokens, known = list(PROMPT), len(PROMPT)
    for _ in range(ROUNDS):
        since, known = tokens[known:], len(tokens)
        (draft,) = speculator.draft([DraftItem(0, 0, len(tokens), since, K)])
        assert [q_rows.fault(row, token, SIZE) for row, token in zip(draft.q, draft.tokens, strict=True)] == [
            ""
        ] * K
        ((verdict,), _) = target.verify([VerifyItem(0, 0, len(tokens), since, draft.tokens, q=draft.q)], 100)
        assert verdict.n_accepted == K
        assert len(verdict.logprobs) == K + 1
        tokens += [*draft.tokens, verdict.next_token]
