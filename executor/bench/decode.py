"""Decoding speed with and without speculation, on the same prompts, in the same run.

The modes take turns, and other engines with them, so that what else the machine does hits them alike. Times
are of whole runs, prompts included.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executor.bench.ceiling import Alone, Counters, Occupancy, occupancy, report
from executor.bench.decode_plan import total_threads
from executor.bench.machine import machine
from executor.bench.peers import Peer, PeerRun, Terms, peer_row, run_peer
from executor.config import available_cores
from executor.errors import InvalidRequest
from executor.llm import LLM
from executor.request import Acceptance
from executor.sampling import SamplingParams
from executor.trace import EVENTS_KEPT, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executor.bench.decode_plan import Plan, Variant
    from executor.bench.prompts import Prompt
    from executor.stats import RoundTime

_WARM_UP_TOKENS = 8
_TIMELINE_EVENTS = 100_000
"""Kept for a timeline: some dozen rounds of many sequences."""


@dataclass(slots=True)
class Tally:
    """What some prompts of one category came to."""

    seconds: float = 0.0
    tokens: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)

    def add(self, other: Tally) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.acceptance.add(other.acceptance)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all prompts, category after category. `round_times` are those of its last rounds."""

    outputs: list[list[int]]
    categories: dict[str, Tally]
    round_times: list[RoundTime]
    occupancy: Occupancy

    @property
    def total(self) -> Tally:
        total = Tally()
        for tally in self.categories.values():
            total.add(tally)
        return total

    @property
    def tokens_per_second(self) -> float:
        return self.total.tokens_per_second


def prepare(plan: Plan) -> dict[Variant, LLM]:
    """An executor for each variant, not started. Fetches models. Raises InvalidConfig."""
    executors = {variant: LLM(plan.config_of(variant)) for variant in plan.variants}
    if plan.timeline:
        for llm in executors.values():
            file = llm.config.trace
            llm.trace = Trace(file, _TIMELINE_EVENTS if file is None else EVENTS_KEPT)
    return executors


def together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results at several batches as one: all rows, and `batch` a list. A single one is left as it is."""
    if len(results) == 1:
        return results[0]
    return results[0] | {
        "rows": [row for result in results for row in result["rows"]],
        "tokens_agree": all(result["tokens_agree"] for result in results),
        "promise_kept": all(result["promise_kept"] for result in results),
        "batch": [result["batch"] for result in results],
    }


def measure(plan: Plan, executors: dict[Variant, LLM], progress: Callable[[str], None]) -> dict[str, Any]:
    """Rows of results, one per variant and peer, and what they hang on. All executors stay loaded until the
    end. `promise_kept`: tokens are the same wherever they do not hang on what was drafted.

    Raises InvalidRequest before anything is loaded, LaneFailed later.
    """
    first = next(iter(executors.values()))
    prompts = _encode(first, plan)
    runs: dict[Variant, list[Run]] = {variant: [] for variant in executors}
    others: dict[Peer, list[PeerRun]] = {peer: [] for peer in plan.peers}
    with ExitStack() as stack:
        terms = _terms(
            plan, first, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speclane-")))
        )
        for llm in executors.values():
            stack.enter_context(llm)
            _run(llm, prompts[: plan.config.max_sequences], plan, _WARM_UP_TOKENS)
        for i in range(plan.repeat):
            for variant, llm in executors.items():
                if i and _learns(llm):
                    llm.swap_speculator(llm.config.speculator)
                    _run(llm, prompts[: plan.config.max_sequences], plan, _WARM_UP_TOKENS)
                run = _run(llm, prompts, plan, plan.new_tokens)
                runs[variant].append(run)
                progress(f"{plan.name(variant)} {i + 1} of {plan.repeat}: {run.tokens_per_second:.2f} tok/s")
            for peer, seen in others.items():
                if seen and seen[-1].error is not None:
                    continue  # what failed once would only take time again
                seen.append(done := run_peer(peer, terms))
                speed = f"{done.tok_s:.2f} tok/s" if done.error is None else done.error
                progress(f"{peer.name} {i + 1} of {plan.repeat}: {speed}")
    digests = {variant: {digest(run.outputs) for run in several} for variant, several in runs.items()}
    bound = [digests[variant] for variant in runs if variant.bound(plan.temperature)]
    rows = _rows(plan, runs)
    off = next((row["tok_s"] for row in rows if row["method"] == plan.name(plan.plain)), None)
    rows += [peer_row(peer, seen, terms, off) for peer, seen in others.items()]
    agreed = {
        "tokens_agree": len(set().union(*digests.values())) == 1,
        "promise_kept": len(set().union(*bound)) <= 1,
    }
    return {"rows": rows} | agreed | _circumstances(plan, prompts)


def _learns(llm: LLM) -> bool:
    """Whether its speculator would know the texts of a run by heart in the next one."""
    return any(lane.engine in ("suffix", "cascade") for lane in llm.coordinator.lanes)


def digest(outputs: Iterable[Sequence[int]]) -> str:
    """SHA-256 of token ids: decimal, a comma between tokens, a newline after each output."""
    text = "".join(",".join(map(str, output)) + "\n" for output in outputs)
    return hashlib.sha256(text.encode()).hexdigest()


def _terms(plan: Plan, llm: LLM, directory: Path) -> Terms:
    """For peers: the same prompts in the same order, in a file there."""
    order = [i for indices in _by_category(plan.prompts).values() for i in indices]
    file = directory / "prompts.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for i in order:
            prompt = plan.prompts[i]
            line = {"question_id": prompt.question_id, "category": prompt.category, "turns": [prompt.text]}
            out.write(json.dumps(line) + "\n")
    return Terms(
        model=llm.target_model,
        prompts=file,
        k=plan.config.num_speculative_tokens,
        new_tokens=plan.new_tokens,
        batch=plan.config.max_sequences,
        threads=total_threads(plan),
        dtype=plan.config.dtype,
        temperature=plan.temperature,
    )


def _encode(llm: LLM, plan: Plan) -> list[list[int]]:
    """Prompt ids; all must leave room for the answer."""
    prompts = []
    for prompt in plan.prompts:
        message = {"role": "user", "content": prompt.text}
        tokens = llm.encode(prompt.text) if plan.raw else llm.encode_chat([message])
        room = llm.max_model_len - len(tokens)
        if room < plan.new_tokens:
            raise InvalidRequest(
                "new_tokens",
                f"prompt {prompt.question_id} has {len(tokens)} tokens, so {plan.new_tokens} more exceed the "
                f"context of {llm.max_model_len}; try {max(1, room)}",
            )
        prompts.append(tokens)
    return prompts


def _run(llm: LLM, prompts: Sequence[Sequence[int]], plan: Plan, new_tokens: int) -> Run:
    """The prompts are the first of the plan's. A category's prompts run together, and no other with them."""
    stats = llm.coordinator.stats
    stats.round_times.clear()
    before = Counters.of(llm)
    outputs: dict[int, list[int]] = {}
    categories: dict[str, Tally] = {}
    for category, indices in _by_category(plan.prompts[: len(prompts)]).items():
        params = [
            SamplingParams(
                temperature=plan.temperature, seed=plan.seed + i, max_tokens=new_tokens, ignore_eos=True
            )
            for i in indices
        ]
        began = time.perf_counter()
        completions = llm.generate([prompts[i] for i in indices], params, progress=False)
        tally = categories[category] = Tally(seconds=time.perf_counter() - began)
        for i, completion in zip(indices, completions, strict=True):
            outputs[i] = completion.token_ids
            tally.tokens += len(completion.token_ids)
            tally.acceptance.add(completion.acceptance)
    seconds, tokens = (sum(getattr(t, part) for t in categories.values()) for part in ("seconds", "tokens"))
    return Run(
        [outputs[i] for i in range(len(prompts))],
        categories,
        list(stats.round_times),
        occupancy(llm, before, seconds, tokens),
    )


def _by_category(prompts: Sequence[Prompt]) -> dict[str, list[int]]:
    """Indices of the prompts of each category, in the order of their first ones."""
    indices: dict[str, list[int]] = {}
    for index, prompt in enumerate(prompts):
        indices.setdefault(prompt.category, []).append(index)
    return indices


def _rows(plan: Plan, runs: dict[Variant, list[Run]]) -> list[dict[str, Any]]:
    medians = {
        variant: statistics.median(run.tokens_per_second for run in several)
        for variant, several in runs.items()
    }
    rows = []
    for variant, several in runs.items():
        # Lanes that take turns do not disturb each other.
        turns = several if variant.mode == "off" else runs.get(variant._replace(mode="sequential"), several)
        seen = [run.occupancy for run in several]
        plain = Alone([run.occupancy for run in runs.get(plan.plain._replace(lanes=variant.lanes), [])])
        occupied = report(seen, Alone([run.occupancy for run in turns]) or Alone(seen), plain)
        rows.append(_row(plan, variant, runs, medians[variant], medians.get(plan.plain)) | occupied)
    return rows


def _row(
    plan: Plan, variant: Variant, runs: dict[Variant, list[Run]], speed: float, off: float | None
) -> dict[str, Any]:
    several = runs[variant]
    total = several[-1].total
    digests = sorted({digest(run.outputs) for run in several})
    return {
        "mode": variant.mode,
        "acceptance": variant.acceptance,
        "lanes": variant.lanes,
        "engine": "speclane",
        "method": plan.name(variant),
        "batch": plan.config.max_sequences,
        **_figures(speed, off, total.acceptance),
        "tokens_sha256": digests[0] if len(digests) == 1 else ",".join(digests),
        "tokens": total.tokens,
        "rounds": total.acceptance.rounds,
        "round_ms": _split([time for run in several for time in run.round_times]),
        "tok_s_each": [round(run.tokens_per_second, 3) for run in several],
        "categories": {
            name: _category(name, several, runs.get(plan.plain)) for name in several[-1].categories
        },
    }


def _category(name: str, several: Sequence[Run], off: Sequence[Run] | None) -> dict[str, Any]:
    def speed(runs: Sequence[Run]) -> float:
        return statistics.median(run.categories[name].tokens_per_second for run in runs)

    tally = several[-1].categories[name]
    return _figures(speed(several), speed(off) if off is not None else None, tally.acceptance)


def _figures(speed: float, off: float | None, acceptance: Acceptance) -> dict[str, Any]:
    return {
        "tok_s": round(speed, 3),
        "speedup": round(speed / off, 4) if off is not None else None,
        "acceptance_length": round(acceptance.length, 4),
        "acceptance_by_position": [round(share, 4) for share in acceptance.by_position],
    }


def _split(times: Sequence[RoundTime]) -> dict[str, float]:
    """Mean milliseconds per round."""
    parts = ("total", "draft", "verify", "wire", "coordinator")
    return {part: round(statistics.fmean(getattr(t, part) for t in times) / 1e6, 4) for part in parts}


def _circumstances(plan: Plan, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    config = plan.config
    return {
        "target": config.target,
        "speculator": config.speculator,
        "k": config.num_speculative_tokens,
        "acceptance": ",".join(plan.ways),
        "lanes": ",".join(plan.lanes),
        "engine": config.engine,
        "dtype": config.dtype,
        "device": config.device,
        "threads": config.threads or available_cores(),
        "cores": available_cores(),
        "batch": config.max_sequences,
        "prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": plan.new_tokens,
        "temperature": plan.temperature,
        "seed": plan.seed,
        "repeat": plan.repeat,
        "machine": machine(),
    }
