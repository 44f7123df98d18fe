"""Decoding speed with and without speculation, on the same prompts, in the same run.

The modes take turns, so that what else the machine does hits them alike. Times are of whole runs, prompts
included.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from executor.config import available_cores
from executor.errors import InvalidConfig, InvalidRequest
from executor.llm import LLM
from executor.request import Acceptance
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executor.bench.prompts import Prompt
    from executor.config import Config
    from executor.stats import RoundTime

Mode = Literal["off", "sequential"]
MODES: tuple[Mode, ...] = get_args(Mode)
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `config` is that of the speculating modes; a prompt's seed is `seed` + its index."""

    config: Config
    prompts: Sequence[Prompt]
    modes: Sequence[Mode]
    new_tokens: int
    temperature: float
    seed: int
    repeat: int
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over all prompts. `round_times` are those of its last rounds."""

    seconds: float
    outputs: list[list[int]]
    acceptance: Acceptance
    round_times: list[RoundTime]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


def prepare(plan: Plan) -> dict[Mode, LLM]:
    """An executor for each mode, not started. Fetches models. Raises InvalidConfig."""
    return {mode: LLM(_config(plan, mode)) for mode in plan.modes}


def measure(plan: Plan, executors: dict[Mode, LLM], progress: Callable[[str], None]) -> dict[str, Any]:
    """Rows of results, one per mode, and what they hang on. All executors stay loaded until the end.

    Raises InvalidRequest before anything is loaded, LaneFailed later.
    """
    prompts = _encode(next(iter(executors.values())), plan)
    runs: dict[Mode, list[Run]] = {mode: [] for mode in plan.modes}
    with ExitStack() as stack:
        for llm in executors.values():
            stack.enter_context(llm)
            _run(llm, prompts[: plan.config.max_sequences], plan, _WARM_UP_TOKENS)
        for i in range(plan.repeat):
            for mode, llm in executors.items():
                run = _run(llm, prompts, plan, plan.new_tokens)
                runs[mode].append(run)
                progress(f"{mode} {i + 1} of {plan.repeat}: {run.tokens_per_second:.2f} tok/s")
    digests = {digest(run.outputs) for several in runs.values() for run in several}
    return {"rows": _rows(plan, runs), "tokens_agree": len(digests) == 1} | _circumstances(plan, prompts)


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


def _config(plan: Plan, mode: Mode) -> Config:
    return plan.config if mode == "sequential" else replace(plan.config, speculator="off")


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
    params = [
        SamplingParams(
            temperature=plan.temperature, seed=plan.seed + i, max_tokens=new_tokens, ignore_eos=True
        )
        for i in range(len(prompts))
    ]
    stats = llm.coordinator.stats
    stats.round_times.clear()
    began = time.perf_counter()
    completions = llm.generate(prompts, params, progress=False)
    seconds = time.perf_counter() - began
    acceptance = Acceptance()
    for completion in completions:
        acceptance.add(completion.acceptance)
    outputs = [completion.token_ids for completion in completions]
    return Run(seconds, outputs, acceptance, list(stats.round_times))


def _rows(plan: Plan, runs: dict[Mode, list[Run]]) -> list[dict[str, Any]]:
    speeds = {
        mode: statistics.median(run.tokens_per_second for run in several) for mode, several in runs.items()
    }
    return [_row(plan, mode, several, speeds) for mode, several in runs.items()]


def _row(plan: Plan, mode: Mode, several: Sequence[Run], speeds: dict[Mode, float]) -> dict[str, Any]:
    off = speeds.get("off")
    acceptance = several[-1].acceptance
    digests = sorted({digest(run.outputs) for run in several})
    return {
        "mode": mode,
        "batch": plan.config.max_sequences,
        "tok_s": round(speeds[mode], 3),
        "speedup": round(speeds[mode] / off, 4) if off is not None else None,
        "acceptance_length": round(acceptance.length, 4),
        "acceptance_by_position": [round(share, 4) for share in acceptance.by_position],
        "tokens_sha256": digests[0] if len(digests) == 1 else ",".join(digests),
        "tokens": sum(map(len, several[-1].outputs)),
        "rounds": acceptance.rounds,
        "round_ms": _split([time for run in several for time in run.round_times]),
        "tok_s_each": [round(run.tokens_per_second, 3) for run in several],
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
    }
