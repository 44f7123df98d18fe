"""The hf engine decodes what transformers decodes: fp32 greedy text of a real model, token for token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers

from ipc.messages import LaneSpec
from workers.engines.engine import Window
from workers.engines.hf import HfEngine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.model

NEW_TOKENS = 64
BATCH = 4
WIDTH = 5

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 2, 4, 8, 16,",
    "The three laws of motion say that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: Why is the sky blue?\nA:",
    "To make bread you need flour, water, yeast and",
    "In 1969 the first people",
    "SELECT name, age FROM people WHERE",
    "La vie est belle parce que",
    "- apples\n- pears\n- ",
    "The opposite of hot is cold. The opposite of tall is",
    "import numpy as np\n\nx = np.",
    "She opened the door and saw",
    "A prime number is a number that",
    '{"name": "Ada", "born": 1815, "known_for": "',
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Photosynthesis is the process by which plants turn light into",
)


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    return [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy text of transformers after each prompt, past its end too, in batches padded on the left."""
    torch.set_num_threads(2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    texts: list[list[int]] = []
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch])
        text = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
        texts.extend(text[:, width:].tolist())
    return texts


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> HfEngine:
    return HfEngine(LaneSpec("target", "hf", str(smollm2), "fp32", "cpu", 2, BATCH, 512))


@pytest.mark.timeout(600)
def test_greedy_text_equals_transformers_generate(
    engine: HfEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for first in range(0, len(prompts), BATCH):
        chosen = range(first, first + BATCH)
        texts = {seq: list(prompts[seq]) for seq in chosen}
        for seq in chosen:
            engine.open(seq)
        rows = engine.forward([Window(seq, 0, texts[seq], 1) for seq in chosen])
        for _ in range(NEW_TOKENS):
            for seq, token in zip(chosen, rows.argmax(1).tolist(), strict=True):
                texts[seq].append(token)
            rows = engine.forward([Window(seq, len(texts[seq]) - 1, texts[seq][-1:], 1) for seq in chosen])
        for seq in chosen:
            engine.close(seq)
            assert texts[seq] == prompts[seq] + expected[seq], PROMPTS[seq]


@pytest.mark.timeout(600)
def test_verify_windows_sample_the_text_they_verify(
    engine: HfEngine, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A wrong draft before each right one must leave no trace."""
    chosen = range(BATCH)
    for seq in chosen:
        engine.open(seq)
        engine.forward([Window(seq, 0, prompts[seq][:-1], 0)])
    for at in range(0, NEW_TOKENS, WIDTH):
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
