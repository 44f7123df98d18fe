"""Log-probabilities of prompts: which are missing, whether the right ones came, and how they are computed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor import prompt_scores
from executor.sampling import SamplingParams
from ipc.messages import OpenedSequence, PendingItem, SamplingSpec, TokenLogprobs, VerifiedItem
from workers.engines.engine import Draw, Score, Window
from workers.prompt_scores import ROWS, score_prompt
from workers.pure_sampler import score
from workers.sampler import Sampler
from workers.sequence import LaneSequence

ENTRY = TokenLogprobs(-1.0, [], 2)


def request(wanted: int | None, prompt_len: int, known: int = 0) -> Any:
    params = SamplingParams(prompt_logprobs=wanted)
    return SimpleNamespace(params=params, prompt_len=prompt_len, prompt_logprobs=[ENTRY] * known)


@pytest.mark.parametrize(
    ("wanted", "prompt_len", "known", "since"),
    [(None, 9, 0, None), (0, 9, 0, 1), (5, 9, 4, 5), (5, 9, 8, None), (5, 1, 0, None)],
)
def test_what_is_missing(wanted, prompt_len, known, since):
    assert prompt_scores.wanted_since(request(wanted, prompt_len, known)) == since


@pytest.mark.parametrize(
    ("its", "held", "count"),
    [
        (request(None, 9), 9, 0),
        (request(0, 9), 0, 0),
        (request(0, 9), 3, 3),  # tokens 1, 2 and 3 have been predicted
        (request(0, 9), 8, 8),
        (request(0, 9), 20, 8),
        (request(0, 9, known=5), 3, 0),  # a successor that is not there yet
        (request(0, 9, known=5), 7, 2),
        (request(0, 9, known=8), 20, 0),
    ],
)
def test_what_must_have_come(its, held, count):
    for told in range(10):
        pending = PendingItem(0, 0, held, prompt_logprobs=[ENTRY] * told)
        verdict = VerifiedItem(0, 0, held, 0, 5, [], prompt_logprobs=[ENTRY] * told)
        assert prompt_scores.as_wanted(its, pending, held) == (told == count)
        assert prompt_scores.as_wanted(its, verdict, held) == (told == count)


class Counting:
    """Rows are positions, and a token's log-probability is minus its row and itself."""

    def __init__(self) -> None:
        self.windows: list[Window] = []

    def forward(self, windows: list[Window]) -> list[int]:
        self.windows += windows
        (window,) = windows
        return list(range(window.start, window.start + len(window.tokens)))

    def scores(self, rows: list[int], tokens: list[int], alternatives: int) -> list[Score]:
        return [
            Score(-(100.0 * row + token), ((0, -1.0),) * alternatives, row + 1)
            for row, token in zip(rows, tokens, strict=True)
        ]


def sequence(tokens: list[int], prompt_len: int) -> LaneSequence:
    spec = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None, prompt_logprobs=1)
    return LaneSequence(OpenedSequence(0, 0, tokens, prompt_len, spec))


def test_a_prompt_is_scored_in_parts_up_to_its_last_token():
    tokens = list(range(40))
    its, engine = sequence(tokens, 38), Counting()
    first = score_prompt(its, 1, 20, engine, engine.forward)
    assert (first.ran, [window.rows for window in engine.windows]) == (20, [ROWS, 20 - ROWS])
    second = score_prompt(its, 21, 100, engine, engine.forward)
    assert second.ran == 17
    expected = [TokenLogprobs(-(100.0 * (i - 1) + i), [(0, -1.0)], i) for i in range(1, 38)]
    assert first.entries + second.entries == expected
    assert score_prompt(its, 38, 100, engine, engine.forward) == ([], 0)
    assert its.window([], 1) == Window(0, 37, [37, 38, 39], 1)


def test_what_is_known_of_a_prompt_is_run_but_not_told():
    its, engine = sequence(list(range(12)), 10), Counting()
    done = score_prompt(its, 8, 100, engine, engine.forward)
    assert done.ran == 9
    assert [entry.rank for entry in done.entries] == [8, 9]
    assert score_prompt(its, 8, 0, engine, engine.forward) == ([], 0)


def test_a_score_is_what_a_sample_of_that_token_reports():
    torch.manual_seed(0)
    logits = torch.randn(6, 300)
    logits[0, 5] = logits[0, 7] = 9.0  # equals, the best
    spec = SamplingSpec(0.7, 1.0, 0, 0.0, 1, 0, (), 4)
    sampler = Sampler(300, "cpu")
    samples = sampler.sample(logits, [Draw(spec, position, 0) for position in range(6)])
    scores = sampler.scores(logits, [sample.token for sample in samples], 4)
    assert [(each.logprob, each.top) for each in scores] == [(each.logprob, each.top) for each in samples]
    for row, sample, each in zip(logits.tolist(), samples, scores, strict=True):
        pure = score(row, sample.token, 4)
        assert pure.rank == each.rank == 1 + sum(logit > row[sample.token] for logit in row)
        assert pure.logprob == pytest.approx(each.logprob, abs=1e-5)
        assert [token for token, _ in pure.top] == [token for token, _ in each.top]
    assert [each.rank for each in sampler.scores(logits[:1].expand(2, 300), [5, 7], 0)] == [1, 1]
    assert sampler.scores(logits[:0], [], 3) == []


def test_rows_that_are_no_numbers_are_errors():
    logits = torch.tensor(np.array([[0.0, 1.0], [0.0, np.nan]], np.float32))
    with pytest.raises(FloatingPointError, match="row 1"):
        Sampler(2, "cpu").scores(logits, [0, 1], 0)
