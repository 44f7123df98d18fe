"""Memory as planned and as measured: every lane's KV is filled, then the kernel is asked for the peak.

Only on CPUs, where all that a lane takes is resident memory of its process.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.bench.stretch import setup
from executor.errors import InvalidConfig
from executor.planning import rows
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.llm import LLM

_NEW_TOKENS = 128
"""So many rounds that the speculator, which is told long prompts piece by piece, comes to hold them all."""


def measure(llm: LLM) -> dict[str, Any]:
    """Per lane, and per rank of it, the planned total and the measured peak in bytes, and measured / planned.

    The peak is the process's own since it had loaded; `load_peak` is that of loading. Raises InvalidConfig
    for lanes on a GPU, LaneFailed.
    """
    config = llm.config
    with llm:
        plan = llm.coordinator.memory
        assert plan is not None, "an executor that serves has a plan"
        if on_gpu := [lane.profile.device for lane in plan.lanes if lane.profile.device != "cpu"]:
            raise InvalidConfig("device", f"device {on_gpu[0]} is not measured; try cpu")
        prompts = _prompts(llm, plan.tokens // config.max_sequences, config.max_sequences)
        params = SamplingParams(max_tokens=_NEW_TOKENS, ignore_eos=True, temperature=0.0)
        completions = llm.generate(prompts, params, progress=False)
        held = sum(len(done.prompt_token_ids) + len(done.token_ids) for done in completions)
        peaks: dict[tuple[str, int], int] = {
            (lane.name, rank): _peak(pid)
            for lane in llm.coordinator.lanes
            for rank, pid in enumerate(lane.pids)
        }
        lanes = [
            {
                "lane": row.name,
                "device": row.device,
                "planned": row.total,
                "measured": peaks[row.lane, row.rank],
                "ratio": round(peaks[row.lane, row.rank] / row.total, 4),
                "load_peak": share.profile.load_peak,
                "plan": row.as_dict(),
            }
            for row, share in zip(rows(plan), plan.lanes, strict=True)
        ]
        measured = {"lanes": lanes, "tokens": plan.tokens, "held_tokens": held}
        made_of = setup(config, config.max_sequences) | {"target_ranks": config.target_ranks}
        return measured | made_of


def _prompts(llm: LLM, length: int, count: int) -> list[Sequence[int]]:
    """Prompts without a common beginning, which with their answers fill so many tokens each."""
    draw = random.Random(0)
    size = llm.vocabulary_size
    length = min(length, llm.max_model_len) - _NEW_TOKENS
    if length < 1:
        raise InvalidConfig("kv_tokens", f"kv_tokens leave no room for {count} sequences; try {64 * count}")
    return [[draw.randrange(size) for _ in range(length)] for _ in range(count)]


def _peak(pid: int) -> int:
    """Bytes; the kernel's high-water mark of resident memory, which the lane reset when it had loaded."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0
