"""What a round costs beside the models: coordinator, codec and wire, with real worker processes.

Both lanes are toys, which answer in microseconds and say how long they computed; the rest of each round is
overhead. A part of it no coordinator could avoid: two round trips between processes, the floor.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

from executor.bench.floor import Floor
from executor.bench.percentile import percentile
from executor.config import Config
from executor.llm import LLM
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from executor.stats import RoundTime

_VOCABULARY = 256
_AGREE = 0.8
_PROMPT = "overhead"
_WARM_UP_ROUNDS = 50
_POLL_SECONDS = 0.01
_ROUND_TRIPS = 2
"""Of a round: one with the speculator, one with the target."""


def measure(*, batch: int, k: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Times of `rounds` rounds in microseconds, each the median over `repeats` of the percentile named.

    Every round has all `batch` sequences, each with a draft of `k` tokens, greedy. `floor_us` is measured in
    turns with the rounds.
    """
    turns = batch + _WARM_UP_ROUNDS + rounds  # sequences may enter one by one
    tokens = turns * (k + 1)
    toy = f"vocabulary={_VOCABULARY},context={tokens + len(_PROMPT) + 2}"
    config = Config(
        engine="toy",
        target=toy,
        speculator=f"{toy},agree={_AGREE}",
        num_speculative_tokens=k,
        max_sequences=batch,
        threads=1,
    )
    runs, trips = [], []
    with Floor() as floor, LLM(config) as llm:
        for _ in range(repeats):
            trips.append(floor.round_trip_us(rounds))
            runs.append(_rounds(llm, batch, turns, tokens)[:rounds])
    floor_us = _ROUND_TRIPS * statistics.median(trips)
    overheads = [[(round_.total - round_.draft - round_.verify) / 1000 for round_ in run] for run in runs]
    everything = [round_ for run in runs for round_ in run]
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
        "floor_us": round(floor_us, 2),
        "over_floor_us": round(p50 - floor_us, 2),
        "per_sequence_us": round(p50 / batch, 3),
        "lanes_us": {
            "draft": round(statistics.median(round_.draft for round_ in everything) / 1000, 2),
            "verify": round(statistics.median(round_.verify for round_ in everything) / 1000, 2),
        },
        "round_us_p50_each": [round(percentile(run, 0.50), 2) for run in overheads],
    }


def _rounds(llm: LLM, batch: int, turns: int, max_tokens: int) -> list[RoundTime]:
    """Run `batch` sequences for so many rounds or more; those after a warm-up in which all took part."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    stats = llm.coordinator.stats
    stats.round_times.clear()
    done = stats.rounds + turns
    streams = [llm.stream(f"{_PROMPT}{i % 10}", params) for i in range(batch)]
    # Nobody reads the streams meanwhile: a reader's time is not the executor's.
    while stats.rounds < done and all(lane.serving for lane in llm.coordinator.lanes):
        time.sleep(_POLL_SECONDS)
    for stream in streams:
        stream.close()
        for _ in stream:
            pass  # raises what the executor failed of
    return [round_ for round_ in stats.round_times if round_.sequences == batch][_WARM_UP_ROUNDS:]
