"""Log-probabilities as OpenAI's two endpoints spell them. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.model import ModelText
    from ipc.messages import TokenLogprobs

_LOWEST = -9999.0
"""What OpenAI says for a token that cannot be; JSON has no infinity."""


def of_chat(text: ModelText, tokens: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """For a chat: an object for each token, with its bytes and its alternatives."""
    content = [
        _named(text, token, entry.logprob)
        | {"top_logprobs": [_named(text, other, logprob) for other, logprob in entry.top]}
        for token, entry in zip(tokens, entries, strict=True)
    ]
    return {"content": content, "refusal": None}


def of_completion(
    text: ModelText, tokens: Sequence[int], entries: Sequence[TokenLogprobs], offset: int
) -> dict[str, Any]:
    """For a completion: parallel lists. `offset`: characters of the answer before the first token."""
    spelled = [_spelled(text, token) for token in tokens]
    offsets = []
    for piece in spelled:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": spelled,
        "token_logprobs": [_finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            {_spelled(text, other): _finite(logprob) for other, logprob in reversed(entry.top)}
            | {piece: _finite(entry.logprob)}
            for piece, entry in zip(spelled, entries, strict=True)
        ],
        "text_offset": offsets,
    }


def _named(text: ModelText, token: int, logprob: float) -> dict[str, Any]:
    raw = text.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _spelled(text: ModelText, token: int) -> str:
    return text.token_bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
