"""Random valid fields of a completion by SmolLM2, short enough to ask for many."""

from __future__ import annotations

from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

PROMPTS = (
    "The cat sat on the mat. The cat sat on the",
    "1, 2, 3, 4, 5, 6, 7, 8,",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
)

_token = st.integers(0, 49151)
_common = st.integers(200, 2000)
_form = st.sampled_from(
    [
        {"regex": "[0-9]{2}, [0-9]{2}, [a-z]+"},
        {"choice": ["the cat sat", "the cat ran", "a dog"]},
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    ]
)
VALID = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(PROMPTS),
        "seed": st.integers(0, (1 << 63) - 1),
        "max_tokens": st.integers(1, 10),
    },
    optional={
        "n": st.just(2),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 60_000),
        "min_p": st.floats(0, 1),
        "stop": st.lists(st.sampled_from([" the", "mat", ".", "e", "\n", "12"]), max_size=2),
        "stop_token_ids": st.lists(_common, max_size=3),
        "min_tokens": st.just(1),
        "ignore_eos": st.booleans(),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "logit_bias": st.dictionaries(_token.map(str), st.floats(-100, 100), max_size=3),
        "allowed_token_ids": st.lists(_common, min_size=1, max_size=40, unique=True),
        "bad_words": st.lists(st.sampled_from(["mat", " cat", "9", "return", "."]), max_size=2),
        "structured_outputs": _form,
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 3),
        "echo": st.booleans(),
    },
)


def some(count: int) -> list[dict[str, Any]]:
    """So many bodies, others each time."""
    drawn: list[dict[str, Any]] = []

    @settings(max_examples=count, phases=[Phase.generate], database=None, deadline=None)
    @given(VALID)
    def draw(body: dict[str, Any]) -> None:
        drawn.append(body)

    draw()
    return drawn
