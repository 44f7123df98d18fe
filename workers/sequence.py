"""A sequence as a lane sees it: the committed tokens it was told, and which of them the engine has cached."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipc.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    from ipc.messages import OpenedSequence, SamplingSpec


class LaneSequence:
    """Only the coordinator's orders write `tokens`; only the lane's own forward passes write `cached`."""

    __slots__ = ("cached", "gen", "prompt_len", "sampling", "seq", "tokens")

    def __init__(self, opened: OpenedSequence) -> None:
        self.seq = opened.seq
        self.gen = opened.gen
        self.prompt_len = opened.prompt_len
        self.sampling: SamplingSpec = opened.sampling
        self.tokens: list[int] = list(opened.tokens)
        self.cached: list[int] = []

    def advance(self, base_len: int, since: SequenceOf[int]) -> None:
        """Make `tokens` the committed history: base_len long, ending in `since`.

        Raises ProtocolError if the lane has not got the tokens before `since`.
        """
        keep = base_len - len(since)
        if not 0 <= keep <= len(self.tokens):
            raise ProtocolError(
                f"sequence {self.seq}: base_len {base_len} with {len(since)} new tokens, but the lane has {len(self.tokens)}"
            )
        del self.tokens[keep:]
        self.tokens.extend(since)

    def uncached(self, wanted: SequenceOf[int] = ()) -> tuple[int, list[int]]:
        """Position and tokens to run so that the engine has seen the history and `wanted`.

        What is cached is kept as far as it equals the history: drafts that were accepted are not run again.
        The last token of the history is always run, since its logits are what a lane is asked for.
        """
        limit = min(len(self.cached), len(self.tokens) - 1)
        start = next((i for i in range(limit) if self.cached[i] != self.tokens[i]), limit)
        run = self.tokens[start:] + list(wanted)
        self.cached[start:] = run
        return start, run
