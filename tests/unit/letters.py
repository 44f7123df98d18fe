"""Requests for tests of the pure parts: text of one character per token, `a` for 0, `b` for 1 …"""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

from executor.request import Request
from executor.sampling import SamplingParams
from executor.text import TextStream
from ipc.messages import SamplingSpec


class Letters:
    """A detokenizer whose flush leaves nothing."""

    def push(self, token: int) -> str:
        return chr(ord("a") + token)

    def flush(self) -> str:
        return ""


def request(prompt: list[int], generated: list[int] | None = None, **params: Any) -> Request:
    """A request that has got as far as `generated`, without regard to what it says about where to end."""
    parsed = SamplingParams(**params)
    spec = SamplingSpec(
        parsed.temperature,
        parsed.top_p,
        parsed.top_k,
        parsed.min_p,
        0,
        parsed.min_tokens,
        parsed.stop_token_ids,
        parsed.logprobs,
    )
    return Request(
        seq=0,
        gen=0,
        prompt_len=len(prompt),
        tokens=[*prompt, *(generated or [])],
        params=parsed,
        spec=spec,
        text=TextStream(Letters(), parsed.stop),
        outputs=SimpleQueue(),
    )
