"""A toy's draft model that says how sure it is of its guesses, as one that drafts worse in branches does."""

from __future__ import annotations

from workers.branches import FIRST_BRANCH
from workers.speculator import never
from workers.speculators.draft import DraftSpeculator


class Confident(DraftSpeculator):
    """Of each guess by so much; in truth it drafts alike everywhere."""

    prefers_fresh = True
    of_sequences = of_branches = 0.5

    def propose(self, asks, cancelled=never):
        proposals = super().propose(asks, cancelled)
        for ask, tokens in zip(asks, proposals, strict=True):
            if ask.confidences is not None:
                sure = self.of_branches if ask.sequence.seq >= FIRST_BRANCH else self.of_sequences
                ask.confidences[:] = [sure] * len(tokens)
        return proposals
