"""Why an answer of a speculator cannot be. Pure; whoever asked decides what comes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipc import q_rows

if TYPE_CHECKING:
    from executor.drafting import Asked
    from ipc.messages import DraftedItem, Prepared


def of_answer(asked: Asked, item: DraftedItem, vocabulary_size: int, *, coupled: bool) -> str:
    """Why an answer cannot be; empty if it can."""
    if not asked.ahead:
        worth = len(item.tokens) if item.worth is None else item.worth
        if item.prepared or not 0 <= worth <= len(item.tokens):
            return f"its draft {item.tokens[:8]} cannot be"
        return _draft_fault(item, asked.k, coupled, vocabulary_size)
    verdicts = [(each.n_accepted, each.next_token) for each in item.prepared]
    if item.tokens or len(verdicts) > asked.hypotheses or len(set(verdicts)) < len(verdicts):
        return f"{len(verdicts)} verdicts where {asked.hypotheses} were to be guessed cannot be"
    for n_accepted, next_token in verdicts:
        if not (0 <= n_accepted <= len(asked.ahead) and 0 <= next_token < vocabulary_size):
            return f"a verdict ({n_accepted}, {next_token}) cannot be"
    faults = (_draft_fault(each, asked.k, coupled, vocabulary_size) for each in item.prepared)
    return next(filter(None, faults), "")


def _draft_fault(draft: DraftedItem | Prepared, k: int, coupled: bool, vocabulary_size: int) -> str:
    """A wrong q row that looks right would show in how often tokens come, so what can be checked is."""
    tokens, q = draft.tokens, draft.q
    if draft.expected is not None and not 0 <= draft.expected <= k:
        return f"{draft.expected} guesses that should stand of {k} cannot be"
    if len(tokens) > k or (tokens and not 0 <= min(tokens) <= max(tokens) < vocabulary_size):
        return f"its draft {tokens[:8]} cannot be"
    if not q:
        return ""
    if coupled or len(q) != len(tokens):
        return (
            "what its draft was drawn from cannot be: "
            f"{len(q)} q rows where {0 if coupled else len(tokens)} are due"
        )
    faults = (q_rows.fault(row, token, vocabulary_size) for row, token in zip(q, tokens, strict=True))
    reason = next(filter(None, faults), "")
    return f"what its draft was drawn from cannot be: {reason}" if reason else ""
