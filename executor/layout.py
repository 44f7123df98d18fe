"""Which cores and how many threads each lane has on a CPU, where nothing else was said. Pure.

Lanes that work at the same time and share cores wait for each other's threads: a parallel step is as slow as
its slowest part. So they get threads for as many cores as there are, between them. On few cores that takes
more from the target than a hidden draft is worth: there, lanes that need not work at once have all in turns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.setting import Mode
    from ipc.messages import LaneSpec

_LOOKUPS = frozenset({"off", "ngram", "suffix"})
_SHARE = 4
"""A speculator that computes gets one core in so many: a draft step costs far less than a target's."""
_FEW = 8
"""With fewer, the target's step becomes longer by more than the fifth that drafting takes at most."""


_COMPUTE = frozenset({"native", "hf", "eagle", "cascade"})
"""Engines whose steps take a core's time; others look up, or wait."""


def contend(lanes: Sequence[LaneSpec], cores: int) -> bool:
    """Whether these lanes, all of them on the CPU, have to compute on the same of so many cores."""
    computing = [lane.threads for lane in lanes if lane.engine in _COMPUTE]
    return len(computing) > 1 and sum(computing) > cores


class Layout(NamedTuple):
    """Cores of each lane; where lanes take turns, all of them for both."""

    target: tuple[int, ...]
    speculator: tuple[int, ...]

    def __str__(self) -> str:
        return "; ".join(
            f"{lane} {len(cores)} thread{'s' if len(cores) > 1 else ''} for cores {','.join(map(str, cores))}"
            for lane, cores in zip(self._fields, self, strict=True)
        )


def layout(cores: Sequence[int], speculator: str, mode: Mode, *, apart: bool) -> Layout:
    """`cores`: those that there are, by number. `apart`: whether lanes are to keep to their own in any
    mode.
    """
    everything = tuple(sorted(cores))
    if len(everything) == 1 or (speculator in _LOOKUPS and not apart):
        return Layout(everything, everything[-1:])
    in_turns = mode == "sequential" or (mode == "auto" and len(everything) < _FEW)
    if in_turns and not apart:
        return Layout(everything, everything)
    theirs = max(1, len(everything) // _SHARE) if speculator not in _LOOKUPS else 1
    return Layout(everything[:-theirs], everything[-theirs:])
