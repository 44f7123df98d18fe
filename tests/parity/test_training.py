"""The parts of deploy/train: what is asked, how a dialogue runs, what is learned, scored and tabulated."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from small_models import save

from workers.speculators.prior import OF, Prior

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "train"))

from dialogue import Dialogue, Markup
from draft import DraftLearner, spread
from frequencies import tabulate
from head import Head, Shape
from learn import Learner
from prompts import CATEGORIES, Prompts, belongs
from simulate import score
from teacher import TOP, Lessons

sys.path.pop(0)

PASSAGES = [f"Passage number {i} tells of something. It has two sentences." for i in range(64)]
MARKUP = Markup(start=[1, 2], user=[3], assistant=[4], end=5, newline=[6])


def test_what_is_evaluated_is_never_trained_on():
    train, held_out = (
        [p for p in PASSAGES if belongs(p, "train")],
        [p for p in PASSAGES if belongs(p, "eval")],
    )
    assert sorted(train + held_out) == sorted(PASSAGES)
    assert held_out
    prompts = Prompts(0, "train", PASSAGES)
    drawn = [prompts.draw() for _ in range(400)]
    assert {category for category, _ in drawn} == set(CATEGORIES)
    assert not any(passage in text for _, text in drawn for passage in held_out)
    assert any(passage in text for _, text in drawn for passage in train)


def test_prompts_follow_from_their_seed():
    def first(seed: int) -> list[tuple[str, str]]:
        prompts = Prompts(seed, "eval", PASSAGES)
        return [prompts.draw() for _ in range(5)]

    assert first(1) == first(1) != first(2)
    with pytest.raises(ValueError, match="none of 0 passages"):
        Prompts(0, "train", [])


def encode(text: str) -> list[int]:
    return [20 + len(text) % 7, 30]


def test_a_dialogue_is_told_questions_and_writes_answers():
    dialogue = Dialogue(MARKUP, Prompts(0, "train", PASSAGES), encode, "a", temperature=0.7, self_asked=0.0)
    steps = [dialogue.step(sampled=5) for _ in range(9)]
    assert steps[:3] == [(1, False), (2, False), (3, False)]
    assert [written for _, written in steps] == [False] * 8 + [True]
    assert [token for token, _ in steps[4:]] == [30, 5, 6, 4, 5]  # the answer ends at once
    assert [dialogue.step(sampled=9) for _ in range(2)] == [(6, False), (3, False)]
    rest = [dialogue.step(sampled=9) for _ in range(8)]
    assert rest[-2:] == [(9, True), (9, True)]
    assert dialogue.temperature == 0.7


def test_a_dialogue_can_ask_itself():
    dialogue = Dialogue(MARKUP, Prompts(0, "train", PASSAGES), encode, "a", temperature=0.0, self_asked=1.0)
    assert [dialogue.step(sampled=9)[0] for _ in range(3)] == [1, 2, 3]
    assert (dialogue.step(sampled=8), dialogue.temperature) == ((8, True), 1.0)
    assert dialogue.step(sampled=5) == (5, True)
    assert [dialogue.step(sampled=9) for _ in range(3)] == [(6, False), (4, False), (9, True)]
    assert dialogue.temperature == 0.0


def test_rounds_are_counted_over_what_was_written():
    written = torch.tensor([[False] * 3 + [True] * 9])
    accepted = torch.zeros(1, 12, dtype=torch.int64)
    accepted[0, 1] = 2  # after position 2, two tokens and one more: the next round begins at 6
    assert score(written, accepted, k=2).length == pytest.approx((3 + 1 + 1 + 1 + 1) / 5)
    assert score(written, accepted, k=2).by_position == [0.2, 0.2]


def test_a_table_keeps_what_longer_contexts_add(tmp_path):
    table = tabulate([np.array([1, 2, 3, 9, 2, 4, 1, 2, 3]), np.array([7, 2, 4])])
    save_file(dict(table._asdict()), tmp_path / "prior.safetensors", {"vocabulary": "x"})
    prior = Prior(tmp_path / "prior.safetensors")
    assert (np.diff(table.keys.astype(np.int64)) > 0).all()
    assert prior.guess([8, 1]).token == 2
    assert prior.guess([1, 2]) == (3, 2, round(OF * 2 / 2.5), OF)
    assert prior.guess([9, 2]) == (4, 2, round(OF / 1.5), OF)
    assert prior.guess([6]) is None


SHAPE = Shape(hidden=16, query_heads=2, kv_heads=1, head_dim=8, inner=24, features=48, window=6)


def lessons() -> Lessons:
    """Of a text that repeats itself, of which the target is quite sure."""
    tokens = torch.arange(12).remainder(4).repeat(3, 1).int()
    features = torch.nn.functional.one_hot(tokens.long(), 48).bfloat16()
    top = (tokens[..., None] + 1 + torch.arange(TOP)).remainder(20).int()
    top[..., 0] = (tokens + 1).remainder(4)
    logprobs = torch.full((3, 12, TOP), -9.0).half()
    logprobs[..., 0] = -0.1
    return Lessons(tokens, torch.ones(3, 12, dtype=torch.bool), features, top, logprobs)


def learner() -> Learner:
    torch.manual_seed(0)
    head = Head(SHAPE)
    return Learner(head, torch.randn(20, 16), torch.arange(10), rate=0.02, decay=0.0)


def learn(made: Learner, steps: int) -> float:
    generator = torch.Generator().manual_seed(1)
    return [made.step(lessons(), generator) for _ in range(steps)][-1]


def test_a_head_learns_to_draft_several_tokens():
    made = learner()
    first = learn(made, 1)
    assert learn(made, 150) < first / 2
    assert made.evaluate(lessons(), k=3).length > 3


def test_learning_goes_on_as_if_it_had_not_stopped(tmp_path):
    whole, part = learner(), learner()
    learn(whole, 4)
    learn(part, 4)
    part.save(tmp_path / "learner.safetensors")
    resumed = learner()
    resumed.load(tmp_path / "learner.safetensors")
    assert resumed.seen == whole.seen == 4 * 36
    learn(whole, 3)
    learn(resumed, 3)
    for one, other in zip(whole.average.parameters(), resumed.average.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_draft_of_some_layers_learns_too(tmp_path):
    target = save(tmp_path / "target", "llama, tied", num_hidden_layers=4)
    made = DraftLearner(target, 2, tmp_path, "cpu", rate=0.003, decay=0.0)
    before = made.evaluate(lessons(), k=3).length
    first = learn(made, 1)
    assert learn(made, 120) < first / 2
    after = made.evaluate(lessons(), k=3)
    assert after.length > max(3, before)
    assert len(after.by_position) == 3
    made.export(tmp_path)
    made.save(tmp_path / "learner.safetensors")
    resumed = DraftLearner(target, 2, tmp_path, "cpu", rate=0.003, decay=0.0)
    assert resumed.evaluate(lessons(), k=3).length > 3  # as exported, in 16 bits
    resumed.load(tmp_path / "learner.safetensors")
    assert resumed.seen == made.seen
    assert resumed.evaluate(lessons(), k=3) == after


def test_layers_are_spread_from_the_first_to_the_last():
    assert spread(30, 6) == [0, 6, 12, 17, 23, 29]
    assert spread(4, 2) == [0, 3]
    assert spread(3, 3) == [0, 1, 2]
    with pytest.raises(ValueError, match="layers must be from 2 to 30, got 1; try 6"):
        spread(30, 1)
