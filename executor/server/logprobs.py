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
    text: ModelText,
    tokens: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offset: int,
    most: int,
) -> dict[str, Any]:
    """For a completion: parallel lists. `offset`: characters of the answer before the first token.

    A prompt's first token has no entry. `most`: of the alternatives, so many.
    """
    spelled = [_spelled(text, token) for token in tokens]
    offsets = []
    for piece in spelled:
        offsets.append(offset)
        offset += len(piece)
    return {
        "tokens": spelled,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [
            None
            if entry is None
            else {_spelled(text, other): _finite(logprob) for other, logprob in reversed(entry.top[:most])}
            | {piece: _finite(entry.logprob)}
            for piece, entry in zip(spelled, entries, strict=True)
        ],
        "text_offset": offsets,
    }


def of_prompt(
    text: ModelText, tokens: Sequence[int], entries: Sequence[TokenLogprobs], most: int | None = None
) -> list[dict[str, Any] | None]:
    """As vLLM spells those of a prompt: by token id, the prompt's own first; none for its first token.

    `most`: of the alternatives, so many; None is all.
    """
    told: list[dict[str, Any] | None] = [None]
    for token, entry in zip(tokens[1:], entries, strict=True):
        ranked = {other: (logprob, i) for i, (other, logprob) in enumerate(entry.top[:most], 1)}
        named = {token: (entry.logprob, entry.rank)} | ranked
        named[token] = entry.logprob, entry.rank
        told.append(
            {
                str(other): {
                    "logprob": _finite(logprob),
                    "rank": rank,
                    "decoded_token": _spelled(text, other),
                }
                for other, (logprob, rank) in named.items()
            }
        )
    return told


def _named(text: ModelText, token: int, logprob: float) -> dict[str, Any]:
    raw = text.token_bytes(token)
    return {"token": raw.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _spelled(text: ModelText, token: int) -> str:
    return text.token_bytes(token).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
