"""The scheduler without a model's noise: toys whose steps take a given time, held against the formula.

Real processes, wire and coordinator; only the lanes' arithmetic is a sleep. What is measured and what the
formula says then differ by what scheduling costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from executor.bench import virtual
from executor.bench.ceiling import Counters
from executor.config import Config, Timeouts
from executor.llm import LLM
from executor.model import prepare
from executor.sampling import SamplingParams
from executor.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from executor.setting import Mode
    from executor.stats import RoundTime

_VOCABULARY = 512
_WARM_UP_TOKENS = 16
_WARM_UP_ROUNDS = 2
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """target_ms, draft_ms: of a step of the whole batch. acceptance: share of contexts in which the draft is
    the target's, 0 … 1; near: share of the others in which what the target says is the draft's second choice.
    """

    target_ms: float
    draft_ms: float
    acceptance: float
    near: float
    batch: int
    mode: Mode | Literal["off"]
    k: int
    hypotheses: int | None
    ubatches: int | None
    new_tokens: int
    repeat: int


def measure(plan: Plan) -> dict[str, Any]:
    """Tokens per target step and sequence, of several runs together, and what the formula says; the same in
    virtual time, where only the steps of lanes take any. Raises ValueError for toys that cannot be.
    """
    config = _config(plan)
    with LLM(config) as llm:
        _run(llm, plan, _WARM_UP_TOKENS)
        before, rounds = Counters.of(llm), []
        for _ in range(plan.repeat):
            _run(llm, plan, plan.new_tokens)
            rounds += _steady(llm.coordinator.stats.round_times)
        counters = Counters.of(llm).since(before)
        setting = llm.coordinator.controller.current
    real = _result(plan, setting, rounds, counters.hits, counters.misses)
    return {"mode": plan.mode, "batch": plan.batch, **real, "virtual": in_virtual_time(plan)}


def in_virtual_time(plan: Plan) -> dict[str, Any]:
    config = _config(plan)
    specs = prepare(config, lambda text: None).specs
    run = virtual.run(
        specs, config.setting, adapts=config.adapts, batch=plan.batch, new_tokens=plan.new_tokens
    )
    return _result(plan, run.setting, _steady(run.round_times), run.hits, run.misses)


def _config(plan: Plan) -> Config:
    toy = f"vocabulary={_VOCABULARY}"
    draft = f"{toy},agree={plan.acceptance:g},near={plan.near:g},step_ms={plan.draft_ms:g}"
    return Config(
        engine="toy",
        target=f"{toy},step_ms={plan.target_ms:g}",
        speculator="off" if plan.mode == "off" else draft,
        mode="sequential" if plan.mode == "off" else plan.mode,
        num_speculative_tokens=plan.k,
        hypotheses=plan.hypotheses,
        ubatches=plan.ubatches,
        max_sequences=plan.batch,
        threads=1,
        timeouts=Timeouts(draft=_PATIENCE, draft_least=_PATIENCE, hang=_PATIENCE),
    )


def _steady(round_times: Iterable[RoundTime]) -> list[RoundTime]:
    """Those while all sequences run, without the first ones, in which lanes hear of them; all, if these are
    few."""
    times = list(round_times)
    most = max(time.running for time in times)
    together = [time for time in times if time.running == most and not time.reads]
    drafts = (i for i, time in enumerate(together) if time.rows > time.sequences)
    return together[next(drafts, 0) + _WARM_UP_ROUNDS :] or times


def _result(
    plan: Plan, setting: Setting, rounds: Sequence[RoundTime], hits: int, misses: int
) -> dict[str, Any]:
    hit = hits / (hits + misses) if hits + misses else 0.0
    if plan.mode == "off":
        setting = Setting(0)
    tokens, verdicts, nanoseconds = (
        sum(getattr(time, part) for time in rounds) for part in ("tokens", "sequences", "total")
    )
    length = tokens / verdicts
    together = max(time.running for time in rounds)
    measured = tokens / together * plan.target_ms / (nanoseconds / 1e6)
    says = formula(plan, setting, length, hit)
    return {
        "k": setting.k,
        "n": setting.hypotheses,
        "ubatches": setting.ubatches,
        "acceptance_length": round(length, 4),
        "hit_rate": round(hit, 4) if hits + misses else None,
        "tokens_per_step": round(measured, 4),
        "formula": round(says, 4),
        "share": round(measured / says, 4),
        "ceiling": round(length / max(1.0, setting.k * plan.draft_ms / plan.target_ms), 4),
    }


def formula(plan: Plan, setting: Setting, length: float, hit: float) -> float:
    """Tokens per target step of a sequence whose verifications yield `length` tokens each.

    In target steps: a verification takes 1, a draft K · c. Sequential: length / (1 + K c). Where verdicts are
    guessed, all wait for drafts only if one verdict of the batch was not, and no draft is ready before it is
    made; or those whose verdict was not guessed sit out a round, if that costs less. With two ubatches each
    lane has one in turn, and a round of both takes what the busier lane needs, or one ubatch needs for both
    of its steps; where verdicts are guessed, nobody waits for drafts, which end when they are needed.
    """
    c = plan.draft_ms / plan.target_ms
    draft = setting.k * c
    parts = setting.ubatches == 2 and plan.batch > 1
    if setting.hypotheses == 0:
        return length / (max(2 * max(1.0, draft), 1 + draft) if parts else 1 + draft)
    if parts:
        return length / (1 + (1 - hit))
    late = max(0.0, (setting.k + 1) * c - 1)  # one step from the end of the draft, then K
    every = hit**plan.batch
    waits = 1 + every * late + (1 - every) * (draft + min(late, c))
    return length / (waits if plan.batch == 1 else min(waits, 1 + late + (1 - hit)))


def _run(llm: LLM, plan: Plan, new_tokens: int) -> None:
    llm.coordinator.stats.round_times.clear()
    params = [
        SamplingParams(temperature=0.0, seed=i, max_tokens=new_tokens, ignore_eos=True)
        for i in range(plan.batch)
    ]
    llm.generate([f"prompt {i}" for i in range(plan.batch)], params, progress=False)
