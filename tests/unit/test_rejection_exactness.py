"""Drafts change nothing in how texts are distributed: enumerated, not sampled; and what would, is found.

The outcome of rounds of draft → verify → recover is enumerated through both lanes and the wire's frames, over
all of their noise, and compared with the target's own distribution to 1e-9.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch
from integral import Integral
from toy_rounds import FREE, PROMPT, Rounds, TensorToy, completed, error, plain

from ipc import q_rows
from workers import noise
from workers.engines.toy import ToyEngine

if TYPE_CHECKING:
    from collections.abc import Callable

EXACT = 1e-9
SEEN = 1e-5
"""A planted bias is at least this large: ten thousand times what passes as exact."""
CONSTRAINED = msgspec.structs.replace(
    FREE, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3, logit_bias=((0, 1.5),)
)


@pytest.fixture(autouse=True)
def _tensors_on_one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


RULES: list[Any] = ["rejection", "block", "coupled"]
LOOKED_UP: list[Any] = ["rejection", "block"]


def test_the_reference_is_the_models_own_distribution():
    rounds = Rounds("rejection", size=4, k=0)
    found = plain(rounds, 2)
    model = rounds.engine
    first = model.exact_probabilities(PROMPT, 0.8)
    for a, b in product(range(4), repeat=2):
        second = model.exact_probabilities([*PROMPT, a], 0.8)
        assert abs(found[a, b] - first[a] * second[b]) < 1e-12


@pytest.mark.parametrize(("size", "k"), [(6, 3), (5, 2), (6, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_one_round(rule, size, k):
    assert error(Rounds(rule, size=size, k=k), k + 1) < EXACT


@pytest.mark.parametrize("rule", LOOKED_UP)
def test_one_round_of_looked_up_tokens(rule):
    assert error(Rounds(rule, size=6, k=3, looks_up=True), 4) < EXACT


@pytest.mark.parametrize("looks_up", [False, True])
@pytest.mark.parametrize("rule", LOOKED_UP)
def test_round_after_round(rule, looks_up):
    assert error(Rounds(rule, size=3, k=2, looks_up=looks_up), 3, None) < EXACT


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.4, "top_k": 3},
        {"temperature": 1.1, "top_p": 0.8},
        {"temperature": 1.2, "min_p": 0.15},
        {"temperature": 0.7, "constraints": CONSTRAINED},
        {"constraints": msgspec.structs.replace(FREE, bad_words=((3, 0), (2,)), allowed_token_ids=(0, 2, 3))},
        {"top_k": 1},
    ],
)
@pytest.mark.parametrize("rule", LOOKED_UP)
def test_filters_and_constraints_are_in_p_and_in_q(rule, sampling):
    assert error(Rounds(rule, size=4, k=2, **sampling), 3) < EXACT


@pytest.mark.parametrize("size_and_k", [(5, 2), pytest.param((6, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("q_form", ["sparse", "full"])
@pytest.mark.parametrize("rule", RULES)
def test_on_tensors(rule, q_form, size_and_k):
    size, k = size_and_k
    assert error(Rounds(rule, size=size, k=k, engine=TensorToy, q_form=q_form), k + 1) < EXACT
    filtered = {"temperature": 1.3, "top_p": 0.85}
    assert error(Rounds(rule, size=4, k=2, engine=TensorToy, q_form=q_form, **filtered), 3) < EXACT


@pytest.mark.parametrize("engine", [ToyEngine, TensorToy])
@pytest.mark.parametrize("rule", LOOKED_UP)
def test_q_of_the_likeliest_tokens_only(rule, engine, monkeypatch):
    monkeypatch.setattr(q_rows, "SPARSE_TOKENS", 2)
    assert error(Rounds(rule, size=4, k=2, engine=engine), 3) < EXACT


@pytest.mark.parametrize("rule", LOOKED_UP)
def test_rows_that_are_lost_cost_acceptance_and_nothing_else(rule):
    rounds = Rounds(rule, size=4, k=2)
    rounds.drafts = lambda item: (rounds.draft(item)[0], [])
    assert error(rounds, 3) < EXACT


# ---------------------------------------------------------------- what would be found


def tampered(rounds: Rounds, change: Callable[[list[int], list[Any]], tuple[list[int], list[Any]]]) -> Rounds:
    """What is verified is not what was drafted."""
    rounds.drafts = lambda item: change(*rounds.draft(item))
    return rounds


@pytest.mark.parametrize("purposes", [("DRAFT", "ACCEPT"), ("DRAFT", "RECOVER"), ("ACCEPT", "RECOVER")])
@pytest.mark.parametrize("rule", LOOKED_UP)
def test_noise_shared_between_purposes(rule, purposes, monkeypatch):
    monkeypatch.setattr(noise, purposes[1], getattr(noise, purposes[0]))
    assert error(Rounds(rule, size=4, k=2), 3) > SEEN


def test_noise_of_a_judged_draft_shared_with_the_next_one():
    """Block verification sees draft tokens that do not stand; what is drafted in their place must be new."""
    forgetful = Integral(name=lambda key: (*key[:-1], 0))
    assert error(Rounds("block", size=3, k=2), 3, None, forgetful) > SEEN


def test_rejection_alone_would_bear_that():
    """A draft token is judged only after all before it stood, and then it is committed or replaced."""
    forgetful = Integral(name=lambda key: (*key[:-1], 0))
    assert error(Rounds("rejection", size=3, k=2), 3, None, forgetful) < EXACT


@pytest.mark.parametrize("rule", LOOKED_UP)
def test_stale_rows(rule):
    rounds = Rounds(rule, size=4, k=2)
    stale = [q_rows.pack([0, 1, 2, 3], rounds.engine.exact_probabilities([3, t], 0.8)) for t in (0, 3)]
    assert error(tampered(rounds, lambda tokens, q: (tokens, stale[: len(q)])), 3) > SEEN


@pytest.mark.parametrize("rule", LOOKED_UP)
def test_rows_off_by_one(rule, monkeypatch):
    shifted = tampered(Rounds(rule, size=4, k=2), lambda tokens, q: (tokens, [*q[1:], *q[:1]]))
    assert error(shifted, 3) > SEEN
    real = ToyEngine.distribution
    rounds = Rounds(rule, size=4, k=2)
    late = lambda self, rows, index, draw: real(self, rows, min(index + 1, len(rows) - 1), draw)  # noqa: E731
    monkeypatch.setattr(rounds.engine, "distribution", late.__get__(rounds.engine))
    assert error(rounds, 3) > SEEN


@pytest.mark.parametrize("rule", LOOKED_UP)
def test_a_padded_row_that_is_accepted(rule):
    """A draft shorter than the others, filled up with a token that nothing speaks against."""
    padding = q_rows.pack([0, 1], [1e-30, 1.0])
    rounds = Rounds(rule, size=4, k=1)
    assert error(tampered(rounds, lambda tokens, q: ([*tokens, 0], [*q, padding])), 3) > SEEN


@pytest.mark.parametrize("rule", LOOKED_UP)
def test_a_temperature_missing_on_one_side(rule):
    rounds = Rounds(rule, size=4, k=2)
    wanted = plain(rounds, 3)
    rounds.target.close([0])
    rounds.open(rounds.target, temperature=1.0)
    hot = Integral().of(lambda: rounds.write(3, 1))
    assert max(abs(p - wanted[t]) for t, p in completed(hot, wanted, 3).items()) > SEEN

    def cold(tokens: list[int], rows: list[Any]) -> tuple[list[int], list[Any]]:
        unpacked = [q_rows.unpack(row) for row in rows]
        return tokens, [q_rows.pack(ids, [w**0.8 for w in weights]) for ids, weights in unpacked]

    assert error(tampered(Rounds(rule, size=4, k=2), cold), 3) > SEEN


@pytest.mark.parametrize("rule", LOOKED_UP)
def test_a_draft_that_ends_before_what_is_unlikely(rule):
    """The decision hangs on the token: likely ones would come more often than they should."""

    def cut(tokens: list[int], rows: list[Any]) -> tuple[list[int], list[Any]]:
        for index, (token, row) in enumerate(zip(tokens, rows, strict=True)):
            ids, weights = q_rows.unpack(row)
            assert ids is not None
            if weights[ids.index(token)] < 0.3 * max(weights):
                return tokens[:index], rows[:index]
        return tokens, rows

    assert error(tampered(Rounds(rule, size=4, k=2), cut), 3) > SEEN
