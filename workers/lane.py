"""What both lanes share: the sequences they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipc.errors import ProtocolError
from workers.sequence import LaneSequence

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ipc.messages import OpenedSequence
    from workers.constraints import Constraints

    Constrain = Callable[[OpenedSequence], Constraints]


class SequenceTable:
    """The open sequences of a lane, by number. Orders about others, or other generations, are errors."""

    def __init__(self, constrain: Constrain | None) -> None:
        """`constrain`: what restricts the sampling of a sequence; None in a lane that samples nothing."""
        self._constrain = constrain
        self._sequences: dict[int, LaneSequence] = {}

    def open(self, opened: OpenedSequence) -> LaneSequence:
        """Raises ProtocolError if the number is taken or the sequence has no tokens."""
        if opened.seq in self._sequences:
            raise ProtocolError(f"sequence {opened.seq} is open already")
        if not opened.tokens:
            raise ProtocolError(f"sequence {opened.seq} has no tokens")
        constraints = None
        if self._constrain is not None and opened.sampling.constraints is not None:
            constraints = self._constrain(opened)
        sequence = self._sequences[opened.seq] = LaneSequence(opened, constraints)
        return sequence

    def close(self, seq: int) -> LaneSequence:
        """Raises ProtocolError if it is not open."""
        sequence = self._sequences.pop(seq, None)
        if sequence is None:
            raise ProtocolError(f"sequence {seq} is not open")
        return sequence

    def advance(self, seq: int, gen: int, base_len: int, since: Sequence[int]) -> LaneSequence:
        """The sequence, brought up to `base_len`. Raises ProtocolError if order and lane disagree."""
        sequence = self._sequences.get(seq)
        if sequence is None or sequence.gen != gen:
            held = "not open" if sequence is None else f"of generation {sequence.gen}"
            raise ProtocolError(f"sequence {seq} of generation {gen} is {held}")
        sequence.advance(base_len, since)
        return sequence
