"""The only writer of a request's tokens: applies a verdict, decides where the text ends. No I/O, no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from executor.request import Delta

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.request import FinishReason, Request
    from ipc.messages import VerifiedItem


def commit(request: Request, draft: Sequence[int], verdict: VerifiedItem, max_model_len: int) -> Delta:
    """Add the accepted drafts and the target's own token, up to where the text ends.

    Tokens, log-probabilities and text end at the same place. What the verdict holds beyond it is dropped.
    """
    request.acceptance.record(len(draft), verdict.n_accepted)
    # From this index on a stop ends the text: at least min_tokens are generated then.
    armed_from = request.params.min_tokens - request.generated - 1
    room = min(request.params.max_tokens - request.generated, max_model_len - len(request.tokens))
    tokens = [*draft[: verdict.n_accepted], verdict.next_token]
    tokens, reason = _cut(tokens, room, request.spec.stop_token_ids, armed_from)
    spoken = tokens[:-1] if reason == "stop" else tokens  # a stop token is no text
    pieces, stop = request.text.push(spoken, armed_from=armed_from)
    if stop is not None:
        tokens, reason = tokens[: stop + 1], "stop"
    logprobs = verdict.logprobs[: len(tokens)]
    is_first = request.generated == 0 and request.params.prompt_logprobs is not None
    request.tokens += tokens
    request.logprobs += logprobs
    drafted = min(verdict.n_accepted, len(tokens))
    drafted_text = sum(map(len, pieces[:drafted]))
    if reason is not None:
        request.finish_reason = reason
        pieces.append(request.text.finish())
    return Delta(
        *("".join(pieces), tokens, logprobs, drafted, drafted_text),
        prompt_logprobs=request.prompt_logprobs if is_first else None,
    )


def _cut(
    tokens: list[int], room: int, stop_token_ids: Sequence[int], armed_from: int
) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the first stop token that counts, or as many as there is room for; which it was."""
    for i, token in enumerate(tokens[:room]):
        if i >= armed_from and token in stop_token_ids:
            return tokens[: i + 1], "stop"
    return tokens[:room], "length" if len(tokens) >= room else None
