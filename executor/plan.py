"""What the next round does: which sequences take part and how many tokens each may draft. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from executor.request import Request


class Limits(NamedTuple):
    """Bounds on a draft. Lengths in tokens; `speculator_len` 0 when there is no speculator to ask."""

    num_speculative_tokens: int
    target_len: int
    speculator_len: int


class Step(NamedTuple):
    """One sequence's part in a round; k is the longest draft that can still be of use.

    `drafted`: whether the speculator holds the sequence, if only to be up to date later on.
    """

    request: Request
    k: int
    drafted: bool = True


def plan_round(
    running: Sequence[Request], limits: Limits, seated: Collection[int] | None = None
) -> list[Step]:
    """Every running sequence is verified; each drafts as far as its end and both lanes' contexts allow.

    seated: the sequences that the speculator has room for (None: all); others are continued without drafts.

    Sequences during whose verification the target died go alone, the least suspect first, until each has had
    a verdict: then the one that kills the target is known, and the others live.
    """
    suspects = [request for request in running if request.strikes]
    if suspects:
        running = [min(suspects, key=lambda request: request.strikes)]
    steps = []
    for request in running:
        drafted = request.speculate and (seated is None or request.seq in seated)
        steps.append(Step(request, _draft_length(request, limits) if drafted else 0, drafted))
    return steps


def prepared_plan(steps: Sequence[Step], limits: Limits) -> list[Step]:
    """Of sequences that are being verified, the same as it will be after their verdicts: each may draft as
    far as it can whatever the verdict is."""
    planned = []
    for step in steps:
        request = step.request
        if step.drafted and request.draft is not None:
            planned.append(step._replace(k=_draft_length(request, limits, len(request.draft.tokens) + 1)))
    return planned


def fitted(lengths: Sequence[int], budget: int | None) -> list[int]:
    """Lengths of drafts, cut so that they sum up to `budget` at most (None: any number): the longest lose
    their ends first, since a guess is the less likely right the farther it is out."""
    cut = list(lengths)
    excess = max(0, sum(cut) - budget) if budget is not None else 0
    for _ in range(excess):
        cut[max(range(len(cut)), key=cut.__getitem__)] -= 1
    return cut


def draft_budget(steps: Sequence[Step], verify_tokens: int) -> int | None:
    """Guesses for which a verification of `verify_tokens` (0: any number) has room, beside the token that
    each sequence runs in any case; None is any number."""
    return max(0, verify_tokens - len(steps)) if verify_tokens else None


def _draft_length(request: Request, limits: Limits, assumed: int = 0) -> int:
    """`assumed`: tokens that may come before the draft, at most."""
    if limits.num_speculative_tokens == 0 or request.pending:
        return 0  # after what is pending a draft would be out of date when its turn comes
    length = len(request.tokens) + assumed
    # A verdict on k drafts commits up to k + 1 tokens, and only the last need not be run by any lane.
    wanted = request.params.max_tokens - request.generated - assumed - 1
    target_room = limits.target_len - length - 1
    speculator_room = limits.speculator_len - length
    return max(0, min(limits.num_speculative_tokens, wanted, target_room, speculator_room))
