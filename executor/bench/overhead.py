"""What a round costs beside the models: coordinator, codec and wire, with real worker processes.

Both lanes are toys, which answer in microseconds and say how long they computed; the rest of each round is
overhead.
"""

from __future__ import annotations

import statistics
from itertools import islice
from typing import TYPE_CHECKING, Any

from executor.config import Config
from executor.llm import LLM
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.coordinator import RoundTime

_VOCABULARY = 256
_AGREE = 0.8
_PROMPT = "overhead"
_WARM_UP_ROUNDS = 50


def measure(*, batch: int, k: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Times of `rounds` rounds in microseconds, each the median over `repeats` of the percentile named.

    Every round has all `batch` sequences, each with a draft of `k` tokens, greedy.
    """
    needed = (_WARM_UP_ROUNDS + rounds) * (k + 1) + len(_PROMPT) + 1
    toy = f"vocabulary={_VOCABULARY},context={needed}"
    config = Config(
        engine="toy",
        target=toy,
        speculator=f"{toy},agree={_AGREE}",
        num_speculative_tokens=k,
        max_sequences=batch,
        threads=1,
    )
    with LLM(config) as llm:
        runs = [_rounds(llm, batch, rounds, needed) for _ in range(repeats)]
    overheads = [[(time.total - time.draft - time.verify) / 1000 for time in run] for run in runs]
    everything = [time for run in runs for time in run]
    p50 = statistics.median(percentile(run, 0.50) for run in overheads)
    return {
        "batch": batch,
        "k": k,
        "rounds": rounds,
        "repeats": repeats,
        "round_us": {
            "p50": round(p50, 2),
            "p99": round(statistics.median(percentile(run, 0.99) for run in overheads), 2),
        },
        "per_sequence_us": round(p50 / batch, 3),
        "lanes_us": {
            "draft": round(statistics.median(time.draft for time in everything) / 1000, 2),
            "verify": round(statistics.median(time.verify for time in everything) / 1000, 2),
        },
        "round_us_p50_each": [round(percentile(run, 0.50), 2) for run in overheads],
    }


def _rounds(llm: LLM, batch: int, rounds: int, max_tokens: int) -> list[RoundTime]:
    """Run `batch` endless sequences for so many rounds after a warm-up; the rounds in which all took part."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    stats = llm.coordinator.stats
    stats.round_times.clear()
    streams = [llm.stream(f"{_PROMPT}{i % 10}", params) for i in range(batch)]
    for _ in islice(streams[-1], _WARM_UP_ROUNDS + rounds):
        pass  # the last one to be admitted: while it runs, all do
    for stream in streams:
        stream.close()
    full = [time for time in tuple(stats.round_times) if time.sequences == batch]
    return full[_WARM_UP_ROUNDS:][:rounds]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]
