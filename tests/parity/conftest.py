"""What transformers makes of a few prompts: computed once, since both engines are held against it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

NEW_TOKENS = 64
SAID = Path(__file__).with_name("greedy.json")

PROMPTS = (
    "The tallest mountain on Earth is",
    "Once upon a time, in a village by the sea,",
    "class Stack:\n    def __init__(self):\n",
    "Water boils at",
    "2, 3, 5, 7, 11,",
    "The three laws of motion say that",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: Why is the sky blue?\nA:",
    "A recipe for pancakes: take two eggs and",
    "In 1969 the first people",
    "SELECT name, age FROM people WHERE",
    "La vie est belle parce que",
    "1. Wake up\n2. Brush teeth\n3.",
    "The opposite of hot is cold. The opposite of tall is",
    "import numpy as np\n\nx = np.",
    "She opened the door and saw",
    "A prime number is a number that",
    '{"name": "Ada", "born": 1815, "known_for": "',
    "The quick brown fox jumps over the lazy dog. " * 12,
    "Photosynthesis is the process by which plants turn light into",
)


class Greedy(NamedTuple):
    """Token ids of each prompt, and of the NEW_TOKENS after it, past the end of the text too."""

    prompts: list[list[int]]
    texts: list[list[int]]


@pytest.fixture(scope="session")
def greedy(smollm2: Path) -> Greedy:
    """float32 greedy `generate` of transformers, a prompt at a time.

    What it once said is on file, and holds if by one pass of transformers each token is the likeliest after
    those before it.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    texts = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # other tests run on the other cores
    for prompt, said in zip(prompts, json.loads(SAID.read_text()), strict=True):
        texts.append(said if _holds(model, prompt, said) else _generated(model, prompt))
    torch.set_num_threads(threads)
    return Greedy(prompts, texts)


@torch.inference_mode()
def _holds(model: Any, prompt: list[int], said: list[int]) -> bool:
    logits = model(torch.tensor([prompt + said])).logits[0, len(prompt) - 1 : -1]
    return len(said) == NEW_TOKENS and logits.argmax(1).tolist() == said


def _generated(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    text = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS)
    return text[0, len(prompt) :].tolist()
