"""What the target says alone, undisturbed, and how long its steps take: the measure of a chaos run."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple

from executor.chaos.gaps import Gaps
from executor.chaos.traffic import run_round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.chaos.plan import Job
    from executor.llm import LLM


class Reference(NamedTuple):
    """`step_seconds`: median time between two tokens of a stream."""

    outputs: list[list[int]]
    step_seconds: float


def make_reference(llm: LLM, jobs: Sequence[Job], concurrency: int) -> Reference:
    """`llm` does not speculate; it is started and closed here. Raises what a request failed of."""
    gaps, lock = Gaps(), threading.Lock()

    def watch(_tokens: int, gap: float | None) -> None:
        if gap is not None:
            with lock:
                gaps.record(gap)

    with llm:
        outcomes = run_round(llm, jobs, concurrency, watch)
    for outcome in outcomes:
        if outcome.failure is not None:
            raise outcome.failure
    return Reference([outcome.completed for outcome in outcomes], gaps.percentile(0.5))
