"""Log-probabilities of prompts, as the coordinator keeps them: whose are wanted, and what came. Pure.

The target reports each of them once. A target that starts again is only asked for those that are missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.request import Request
    from ipc.messages import PendingItem, VerifiedItem


def wanted_since(request: Request) -> int | None:
    """The first position of the prompt whose log-probability is missing; None if none is wanted any more.

    The first token of a prompt has none, since nothing predicts it.
    """
    if request.params.prompt_logprobs is None:
        return None
    since = 1 + len(request.prompt_logprobs)
    return since if since < request.prompt_len else None


def as_wanted(request: Request, told: VerifiedItem | PendingItem, held: int) -> bool:
    """Whether a target that has run `held` tokens said what it must, and no more."""
    since = wanted_since(request)
    if since is None:
        return not told.prompt_logprobs
    known = min(held, request.prompt_len - 1)  # that token is the last that has been predicted
    return len(told.prompt_logprobs) == max(0, known - since + 1)
