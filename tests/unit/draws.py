"""Draws for tests: everything neutral unless a test says otherwise."""

from __future__ import annotations

from typing import Any

from ipc.messages import LaneSpec, SamplingSpec
from workers.engines.engine import Draw

NEUTRAL: dict[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": 0,
    "min_tokens": 0,
    "stop_token_ids": (),
    "logprobs": None,
}


def draw(position: int = 0, generated: int = 0, **changes: Any) -> Draw:
    return Draw(SamplingSpec(**{**NEUTRAL, **changes}), position, generated)


def toy_lane(parameters: str, max_sequences: int = 4, max_model_len: int = 0) -> LaneSpec:
    return LaneSpec("target", "toy", parameters, "fp32", "cpu", 1, max_sequences, max_model_len)
