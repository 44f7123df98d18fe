"""The only writer of a request's tokens: applies a verdict, decides where the text ends. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.request import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.request import FinishReason, Request
    from ipc.messages import TokenLogprobs, VerifiedItem


def commit(request: Request, draft: Sequence[int], verdict: VerifiedItem, max_model_len: int) -> Delta:
    """Add the accepted drafts and the target's own token, up to where the text ends.

    Tokens, log-probabilities and text end at the same place. What the verdict holds beyond it is dropped.
    """
    request.acceptance.record(len(draft), verdict.n_accepted)
    first = len(request.tokens)
    pieces = []
    tokens = [*draft[: verdict.n_accepted], verdict.next_token]
    logprobs: Sequence[TokenLogprobs | None] = verdict.logprobs or [None] * len(tokens)
    for token, logprob in zip(tokens, logprobs, strict=True):
        request.tokens.append(token)
        if logprob is not None:
            request.logprobs.append(logprob)
        piece, reason = _extend_text(request, token, max_model_len)
        pieces.append(piece)
        if reason is not None:
            request.finish_reason = reason
            pieces.append(request.text.finish())
            break
    return Delta("".join(pieces), request.tokens[first:])


def _extend_text(request: Request, token: int, max_model_len: int) -> tuple[str, FinishReason | None]:
    """The text that became certain, and whether it ends with this token. A stop beats the length cap."""
    armed = request.generated >= request.params.min_tokens
    if token in request.spec.stop_token_ids and armed:
        return "", "stop"
    piece, stopped = request.text.push(token, armed=armed)
    if stopped:
        return piece, "stop"
    if request.generated >= request.params.max_tokens or len(request.tokens) >= max_model_len:
        return piece, "length"
    return piece, None
