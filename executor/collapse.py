"""Whether drafts have become useless, and whether to start the speculator again for it. Pure.

Drafts that come in time and are never accepted are a fault that no deadline sees: the text is right, and
every round pays for guesses that are thrown away.
"""

from __future__ import annotations


class Collapse:
    """Of one speculator, through all its incarnations. `alarm`: what is wrong, empty while nothing is."""

    def __init__(self, rounds: int, share: float) -> None:
        """`rounds`: how many with drafts are judged together. `share`: of their drafted tokens, 0 … 1, below
        which acceptance has collapsed."""
        self.alarm = ""
        self._window = rounds
        self._share = share
        self._epoch = ""
        self._restarted = False
        self._begin()

    def note(self, epoch: str, drafted: int, accepted: int) -> bool:
        """One round of an incarnation, in tokens over all sequences. Whether to start it again.

        That is so once: one that is as useless after its restart is left alone, and the alarm stands until
        drafts are accepted again.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            self._begin()
        if drafted == 0:
            return False
        self._rounds += 1
        self._drafted += drafted
        self._accepted += accepted
        if self._rounds < self._window:
            return False
        self.alarm = self._judge()
        self._begin()
        if not self.alarm or self._restarted:
            return False
        self._restarted = True
        return True

    def _judge(self) -> str:
        if self._accepted >= self._share * self._drafted:
            return ""
        return f"acceptance collapsed: {self._accepted} of {self._drafted} drafted tokens were accepted"

    def _begin(self) -> None:
        self._rounds = self._drafted = self._accepted = 0
