"""One round of traffic: so many requests at a time, each read to its end. Knows nothing of faults."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

from executor.errors import SpeclaneError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor.chaos.plan import Job
    from executor.llm import LLM


class Outcome(NamedTuple):
    """`streamed`: the deltas' tokens, one after the other; `completed`: those of the completion."""

    streamed: list[int]
    completed: list[int]
    failure: SpeclaneError | None = None

    def first_difference(self, reference: Sequence[int]) -> int | None:
        """Where what the user saw first departs from the reference, or None."""
        for seen in (self.streamed, self.completed):
            if seen != reference:
                same = (a == b for a, b in zip(seen, reference, strict=False))
                return next((i for i, equal in enumerate(same) if not equal), min(len(seen), len(reference)))
        return None


def run_round(
    llm: LLM, jobs: Sequence[Job], concurrency: int, watch: Callable[[int, float | None], None]
) -> list[Outcome]:
    """Outcomes in the order of the jobs.

    watch: called by any thread for each delta with its number of tokens and the seconds since the delta
        before it, None for the first. If this is interrupted, the executor is closed.
    """
    leaving = threading.Event()

    def read(job: Job) -> Outcome:
        return _read(llm, job, watch) if not leaving.is_set() else Outcome([], [])

    with ThreadPoolExecutor(concurrency, "speclane-chaos") as readers:
        futures = [readers.submit(read, job) for job in jobs]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            return [future.result() for future in futures]
        except BaseException:
            leaving.set()
            llm.close()  # answers whoever still reads
            raise


def _read(llm: LLM, job: Job, watch: Callable[[int, float | None], None]) -> Outcome:
    streamed: list[int] = []
    before = None
    try:
        stream = llm.stream(job.prompt, job.params)
        for delta in stream:
            now = time.perf_counter()
            streamed += delta.token_ids
            watch(len(delta.token_ids), now - before if before is not None else None)
            before = now
    except SpeclaneError as failure:
        return Outcome(streamed, [], failure)
    return Outcome(streamed, stream.completion.token_ids)
