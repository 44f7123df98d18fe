"""Rejection sampling: which tokens of a draft stand, so that the text is distributed as the target's own.

A token x that was drawn from q stands with probability min(1, p(x) / q(x)); the first that does not is
replaced by one drawn from (p - q)⁺ (arXiv 2211.17192). A token that was not drawn is as one drawn from itself
alone: it stands with p(x), and else p without x takes its place. That is right for any x, however it came
about, so it is also the rule for a row that was lost.

Block verification (arXiv 2403.10444) judges the draft as a whole and keeps more of it. How much of it stands
then hangs on all of its tokens, also on those that do not.

Pure; all noise is an argument. The decision whether a token is drafted and verified must not hang on the
token itself: to drop unlikely ones, say, would make the likely ones more frequent than they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ipc.messages import Acceptance
    from workers.distribution import Distribution
    from workers.q_row import Q


class Standing(NamedTuple):
    """So many draft tokens stand. Unless these are all, the next token is drawn from (reach · p - q)⁺."""

    n_accepted: int
    reach: float


def judge(
    rule: Acceptance,
    draft: Sequence[int],
    qs: Sequence[Q],
    target: Callable[[int], Distribution],
    fraction: Callable[[int], float],
) -> Standing:
    """`qs[i]`: what draft[i] was drawn from. `target(i)`: what the target samples after draft[:i] from.
    `fraction(i)`: a number in [0, 1) that decides over draft[i] and nothing else.

    Raises ValueError if there are not as many rows as tokens.
    """
    if len(qs) != len(draft):
        raise ValueError(f"{len(draft)} draft tokens need {len(draft)} q rows, got {len(qs)}")
    if rule == "block":
        return _judge_block(draft, qs, target, fraction)
    for index, (token, q) in enumerate(zip(draft, qs, strict=True)):
        if not stands(fraction(index), target(index).probability(token) / q.probability(token)):
            return Standing(index, 1.0)
    return Standing(len(draft), 1.0)


def stands(fraction: float, chance: float) -> bool:
    """Whether what happens with probability `chance` happens; a chance of 1 or more always does."""
    return fraction < chance


def _judge_block(
    draft: Sequence[int],
    qs: Sequence[Q],
    target: Callable[[int], Distribution],
    fraction: Callable[[int], float],
) -> Standing:
    """Algorithm 2 there. `reaches[i]`: how probable it is, given the draft, that its first i tokens stand."""
    reaches = [1.0]
    chances: list[float] = []
    for index, (token, q) in enumerate(zip(draft, qs, strict=True)):
        at = target(index)
        if index:
            chances.append(_chance(reaches[-1], at.overlap(q, reaches[-1])))
        reaches.append(min(1.0, reaches[-1] * at.probability(token) / q.probability(token)))
        if reaches[-1] == 0.0:
            break  # it cannot stand, nor can any token after it; their rows may be of no use
    chances.append(reaches[-1])
    # The longest run that stands counts. The last chance is of the whole draft, or 0.
    for index in reversed(range(len(chances))):
        if stands(fraction(index), chances[index]):
            return Standing(index + 1, reaches[index + 1])
    return Standing(0, 1.0)


def _chance(reach: float, overlap: float) -> float:
    """That a run stands which the longer ones have left over: Σ (reach · p - q)⁺ = reach - overlap, divided
    by itself plus 1 - reach. If nothing can be left over, a longer run always stands."""
    rest = 1.0 - overlap
    return max(0.0, reach - overlap) / rest if rest > 0.0 else 1.0
