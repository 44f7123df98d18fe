"""The hf engine decodes what transformers decodes: fp32 greedy text of a real model, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ipc.messages import LaneSpec
from workers.engines.engine import Window
from workers.engines.hf import HfEngine
from workers.lifecycle import made_ready

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Greedy

pytestmark = pytest.mark.model

BATCH = 4
WIDTH = 5


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> HfEngine:
    return made_ready(HfEngine(LaneSpec("target", "hf", str(smollm2), "fp32", "cpu", 1, BATCH, 512)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("batches", [range(1), pytest.param(range(1, 5), marks=pytest.mark.slow)])
def test_greedy_text_equals_transformers_generate(engine: HfEngine, greedy: Greedy, batches: range) -> None:
    prompts, expected = greedy
    assert len(prompts) == 5 * BATCH
    for first in (BATCH * batch for batch in batches):
        chosen = range(first, first + BATCH)
        texts = {seq: list(prompts[seq]) for seq in chosen}
        for seq in chosen:
            engine.open(seq)
        rows = engine.forward([Window(seq, 0, texts[seq], 1) for seq in chosen])
        for _ in range(len(expected[first])):
            for seq, token in zip(chosen, rows.argmax(1).tolist(), strict=True):
                texts[seq].append(token)
            rows = engine.forward([Window(seq, len(texts[seq]) - 1, texts[seq][-1:], 1) for seq in chosen])
        for seq in chosen:
            engine.close(seq)
            assert texts[seq] == prompts[seq] + expected[seq]


@pytest.mark.timeout(600)
def test_verify_windows_sample_the_text_they_verify(engine: HfEngine, greedy: Greedy) -> None:
    """A wrong draft before each right one must leave no trace."""
    prompts, expected = greedy
    chosen = range(BATCH)
    for seq in chosen:
        engine.open(seq)
        engine.forward([Window(seq, 0, prompts[seq][:-1], 0)])
    for at in range(0, len(expected[0]), WIDTH):
        right, wrong = [], []
        for seq in chosen:
            window = [prompts[seq][-1], *expected[seq][:-1]][at : at + WIDTH]
            start = len(prompts[seq]) - 1 + at
            right.append(Window(seq, start, window, len(window)))
            wrong.append(Window(seq, start, [window[0], *reversed(window[1:])], 0))
        engine.forward(wrong)
        sampled = engine.forward(right).argmax(1).tolist()
        assert sampled == [token for seq in chosen for token in expected[seq][at : at + WIDTH]]
    for seq in chosen:
        engine.close(seq)
