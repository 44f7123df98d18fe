"""The acceptance rule of coupled sampling: a draft token stands iff it equals the target's own sample.

Pure; knows neither models nor the wire. Because the target's sample at a position depends only on the seed,
the position and the tokens before it, the text is the one that the target would write without any draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def accept(draft: Sequence[int], sampled: Sequence[int]) -> tuple[int, int]:
    """Number of draft tokens that stand, and the token after them.

    `sampled[i]` is the target's sample after draft[:i], so there is one more of them than draft tokens.
    Raises ValueError otherwise.
    """
    if len(sampled) != len(draft) + 1:
        raise ValueError(f"{len(draft)} draft tokens need {len(draft) + 1} samples, got {len(sampled)}")
    for index, token in enumerate(draft):
        if token != sampled[index]:
            return index, sampled[index]
    return len(draft), sampled[-1]
