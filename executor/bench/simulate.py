"""The scheduler without a model's noise: toys whose steps take a given time, held against the formula.

Real processes, wire and coordinator; only the lanes' arithmetic is a sleep. What is measured and what the
formula says then differ by what scheduling costs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from executor.bench import virtual
from executor.bench.ceiling import Counters
from executor.config import Config, Timeouts
from executor.llm import LLM
from executor.model import prepare
from executor.request import Acceptance
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable

    from executor.setting import Mode, Setting
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
    """Tokens per target step and sequence, the median of several runs, and what the formula says; the same in
    virtual time, where only the steps of lanes take any. Raises ValueError for toys that cannot be.
    """
    config = _config(plan)
    with LLM(config) as llm:
        _run(llm, plan, _WARM_UP_TOKENS)
        before, acceptance, rounds = Counters.of(llm), Acceptance(), []
        for _ in range(plan.repeat):
            acceptance.add(_run(llm, plan, plan.new_tokens))
            rounds.append(_round_ms(llm.coordinator.stats.round_times))
        counters = Counters.of(llm).since(before)
        setting = llm.coordinator.controller.current
    real = _result(plan, setting, acceptance, statistics.median(rounds), counters.hits, counters.misses)
    return {"mode": plan.mode, "batch": plan.batch, **real, "virtual": _virtual(plan, config)}


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


def _virtual(plan: Plan, config: Config) -> dict[str, Any]:
    specs = prepare(config, lambda text: None).specs
    done = virtual.run(
        specs, config.setting, adapts=config.adapts, batch=plan.batch, new_tokens=plan.new_tokens
    )
    stats = done.stats
    return _result(
        plan, done.setting, stats.acceptance, _round_ms(stats.round_times), stats.hits, stats.misses
    )


def _result(
    plan: Plan, setting: Setting, acceptance: Acceptance, round_ms: float, hits: int, misses: int
) -> dict[str, Any]:
    hit = hits / (hits + misses) if hits + misses else 0.0
    if plan.mode == "off":
        setting = setting._replace(k=0)
    parts = 2 if setting.ubatches == 2 and plan.batch > 1 else 1
    measured = acceptance.length * plan.target_ms / (parts * round_ms)
    says = formula(plan, setting, acceptance.length, hit)
    return {
        "k": setting.k,
        "n": setting.hypotheses,
        "ubatches": setting.ubatches,
        "acceptance_length": round(acceptance.length, 4),
        "hit_rate": round(hit, 4) if hits + misses else None,
        "tokens_per_step": round(measured, 4),
        "formula": round(says, 4),
        "share": round(measured / says, 4),
        "ceiling": round(acceptance.length / max(1.0, setting.k * plan.draft_ms / plan.target_ms), 4),
    }


def formula(plan: Plan, setting: Setting, length: float, hit: float) -> float:
    """Tokens per target step of a sequence whose verifications yield `length` tokens each.

    In target steps: a verification takes 1, a draft K · c. Sequential: length / (1 + K c). Where verdicts are
    guessed, all wait for drafts only if one verdict of the batch was not, and no draft is ready before it is
    made; or those whose verdict was not guessed sit out a round, if that costs less. With two ubatches each
    lane has one in turn, and a round of both takes what the busier lane needs, or one ubatch needs for both
    of its steps.
    """
    c = plan.draft_ms / plan.target_ms
    draft = setting.k * c
    if setting.ubatches == 2 and plan.batch > 1:
        return length / max(2 * max(1.0, draft), 1 + draft)
    if setting.hypotheses == 0:
        return length / (1 + draft)
    late = max(0.0, (setting.k + 1) * c - 1)  # one step from the end of the draft, then K
    every = hit**plan.batch
    waits = 1 + every * late + (1 - every) * (draft + min(late, c))
    return length / (waits if plan.batch == 1 else min(waits, 1 + late + (1 - hit)))


def _run(llm: LLM, plan: Plan, new_tokens: int) -> Acceptance:
    llm.coordinator.stats.round_times.clear()
    params = [
        SamplingParams(temperature=0.0, seed=i, max_tokens=new_tokens, ignore_eos=True)
        for i in range(plan.batch)
    ]
    acceptance = Acceptance()
    for completion in llm.generate([f"prompt {i}" for i in range(plan.batch)], params, progress=False):
        acceptance.add(completion.acceptance)
    return acceptance


def _round_ms(round_times: Iterable[RoundTime]) -> float:
    """The mean round while all sequences ran; at the end some are done before others."""
    times = list(round_times)[_WARM_UP_ROUNDS:]
    most = max(time.sequences for time in times)
    return statistics.fmean(time.total for time in times if time.sequences == most) / 1e6
