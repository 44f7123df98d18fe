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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from executor.bench.ceiling import Counters, Occupancy, alone, occupancy, report
from executor.bench.machine import machine
from executor.bench.peers import Peer, PeerRun, Terms, peer_row, run_peer
from executor.config import MAX_SEQUENCES, available_cores
from executor.errors import InvalidConfig, InvalidRequest
from executor.llm import LLM
from executor.request import Acceptance
from executor.sampling import SamplingParams
from executor.trace import EVENTS_KEPT, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executor.bench.prompts import Prompt
    from executor.config import Config
    from executor.stats import RoundTime

Mode = Literal["off", "sequential", "ahead", "outcomes", "auto"]
MODES: tuple[Mode, ...] = get_args(Mode)
_WARM_UP_TOKENS = 8
_TIMELINE_EVENTS = 100_000
"""Kept for a timeline: some dozen rounds of many sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `config` is that of the speculating modes; a prompt's seed is `seed` + its index.

    `timeline`: whether executors keep what their lanes did last; see `LLM.trace`.
    """

    config: Config
    prompts: Sequence[Prompt]
    modes: Sequence[Mode]
    new_tokens: int
    temperature: float
    seed: int
    repeat: int
    raw: bool = False
    peers: Sequence[Peer] = ()
    timeline: bool = False


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


def prepare(plan: Plan) -> dict[Mode, LLM]:
    """An executor for each mode, not started. Fetches models. Raises InvalidConfig."""
    executors = {mode: LLM(_config(plan, mode)) for mode in plan.modes}
    if plan.timeline:
        for llm in executors.values():
            file = llm.config.trace
            llm.trace = Trace(file, _TIMELINE_EVENTS if file is None else EVENTS_KEPT)
    return executors


def at_batches(plan: Plan, batches: Sequence[int]) -> list[Plan]:
    """The same with so many sequences at once; traces of several are told apart by their names."""
    plans = []
    for batch in batches:
        trace = plan.config.trace
        if trace is not None and len(batches) > 1:
            trace = trace.with_stem(f"{trace.stem}-batch{batch}")
        plans.append(replace(plan, config=replace(plan.config, max_sequences=batch, trace=trace)))
    return plans


def together(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Results at several batches as one: all rows, and `batch` a list. A single one is left as it is."""
    if len(results) == 1:
        return results[0]
    return results[0] | {
        "rows": [row for result in results for row in result["rows"]],
        "tokens_agree": all(result["tokens_agree"] for result in results),
        "batch": [result["batch"] for result in results],
    }


def measure(plan: Plan, executors: dict[Mode, LLM], progress: Callable[[str], None]) -> dict[str, Any]:
    """Rows of results, one per mode and peer, and what they hang on. All executors stay loaded until the end.

    Raises InvalidRequest before anything is loaded, LaneFailed later.
    """
    first = next(iter(executors.values()))
    prompts = _encode(first, plan)
    runs: dict[Mode, list[Run]] = {mode: [] for mode in plan.modes}
    others: dict[Peer, list[PeerRun]] = {peer: [] for peer in plan.peers}
    with ExitStack() as stack:
        terms = _terms(
            plan, first, Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="speclane-")))
        )
        for llm in executors.values():
            stack.enter_context(llm)
            _run(llm, prompts[: plan.config.max_sequences], plan, _WARM_UP_TOKENS)
        for i in range(plan.repeat):
            for mode, llm in executors.items():
                if i and _learns(llm):
                    llm.swap_speculator(llm.config.speculator)
                    _run(llm, prompts[: plan.config.max_sequences], plan, _WARM_UP_TOKENS)
                run = _run(llm, prompts, plan, plan.new_tokens)
                runs[mode].append(run)
                progress(f"{mode} {i + 1} of {plan.repeat}: {run.tokens_per_second:.2f} tok/s")
            for peer, seen in others.items():
                if seen and seen[-1].error is not None:
                    continue  # what failed once would only take time again
                seen.append(done := run_peer(peer, terms))
                speed = f"{done.tok_s:.2f} tok/s" if done.error is None else done.error
                progress(f"{peer.name} {i + 1} of {plan.repeat}: {speed}")
    digests = {digest(run.outputs) for several in runs.values() for run in several}
    rows = _rows(plan, runs)
    off = next((row["tok_s"] for row in rows if row["mode"] == "off"), None)
    rows += [peer_row(peer, seen, terms, off) for peer, seen in others.items()]
    return {"rows": rows, "tokens_agree": len(digests) == 1} | _circumstances(plan, prompts)


def _learns(llm: LLM) -> bool:
    """Whether its speculator would know the texts of a run by heart in the next one."""
    return any(lane.engine in ("suffix", "cascade") for lane in llm.coordinator.lanes)


def digest(outputs: Iterable[Sequence[int]]) -> str:
    """SHA-256 of token ids: decimal, a comma between tokens, a newline after each output."""
    text = "".join(",".join(map(str, output)) + "\n" for output in outputs)
    return hashlib.sha256(text.encode()).hexdigest()


def parse_modes(text: str) -> list[Mode]:
    """`off,sequential`. Raises InvalidConfig."""
    valid = ", ".join(MODES)
    modes: list[Mode] = []
    for part in text.split(","):
        mode = next((known for known in MODES if known == part.strip()), None)
        if mode is None:
            raise InvalidConfig(
                "modes", f"modes has no {part.strip()!r}, only {valid}; try {','.join(MODES)}"
            )
        if mode in modes:
            raise InvalidConfig("modes", f"modes names {mode} twice; try {','.join(MODES)}")
        modes.append(mode)
    return modes


def parse_batches(text: str) -> list[int]:
    """`1,2,4,8`. Raises InvalidConfig."""
    batches: list[int] = []
    for part in text.split(","):
        batch = int(part) if part.strip().isdecimal() else 0
        if not 1 <= batch <= MAX_SEQUENCES:
            raise InvalidConfig(
                "batch",
                f"batch must be whole, from 1 to {MAX_SEQUENCES}, got {part.strip()!r}; try 8 or 1,2,4,8",
            )
        if batch in batches:
            raise InvalidConfig("batch", f"batch names {batch} twice; try 1,2,4,8")
        batches.append(batch)
    return batches


def total_threads(plan: Plan) -> int:
    """The most that the lanes of any mode compute with at once: of one if they take turns, else of both."""
    most = 1
    for mode in plan.modes:
        config = _config(plan, mode)
        target, speculator = config.threads_of("target"), config.threads_of("speculator")
        if mode == "off":
            own = target
        elif mode == "sequential":
            own = max(target, speculator)
        else:
            own = target + speculator
        most = max(most, own)
    return min(most, available_cores())


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


def _config(plan: Plan, mode: Mode) -> Config:
    trace = plan.config.trace
    if trace is not None:
        trace = trace.with_stem(f"{trace.stem}-{mode}")
    if mode == "off":
        return replace(plan.config, speculator="off", trace=trace)
    # What was said of hypotheses is for the modes that have some.
    hypotheses = 0 if mode == "sequential" else plan.config.hypotheses
    return replace(plan.config, mode=mode, hypotheses=hypotheses, trace=trace)


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


def _rows(plan: Plan, runs: dict[Mode, list[Run]]) -> list[dict[str, Any]]:
    medians = {
        mode: statistics.median(run.tokens_per_second for run in several) for mode, several in runs.items()
    }
    rows = []
    for mode, several in runs.items():
        # Lanes that take turns do not disturb each other.
        turns = runs.get("sequential", several) if mode != "off" else several
        seen = [run.occupancy for run in several]
        length = several[-1].total.acceptance.length
        occupied = report(seen, length, alone([run.occupancy for run in turns]))
        rows.append(_row(plan, mode, runs, medians[mode], medians.get("off")) | occupied)
    return rows


def _row(
    plan: Plan, mode: Mode, runs: dict[Mode, list[Run]], speed: float, off: float | None
) -> dict[str, Any]:
    several = runs[mode]
    total = several[-1].total
    digests = sorted({digest(run.outputs) for run in several})
    return {
        "mode": mode,
        "engine": "speclane",
        "method": mode,
        "batch": plan.config.max_sequences,
        **_figures(speed, off, total.acceptance),
        "tokens_sha256": digests[0] if len(digests) == 1 else ",".join(digests),
        "tokens": total.tokens,
        "rounds": total.acceptance.rounds,
        "round_ms": _split([time for run in several for time in run.round_times]),
        "tok_s_each": [round(run.tokens_per_second, 3) for run in several],
        "categories": {name: _category(name, several, runs.get("off")) for name in several[-1].categories},
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
    """Mean milliseconds per round; `wire` is what neither lane computed: coordinator, codec and waiting."""
    total, draft, verify = (
        statistics.fmean(parts) / 1e6
        for parts in zip(*((t.total, t.draft, t.verify) for t in times), strict=True)
    )
    return {
        "total": round(total, 4),
        "draft": round(draft, 4),
        "verify": round(verify, 4),
        "wire": round(total - draft - verify, 4),
    }


def _circumstances(plan: Plan, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    config = plan.config
    return {
        "target": config.target,
        "speculator": config.speculator,
        "k": config.num_speculative_tokens,
        "acceptance": config.acceptance,
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
