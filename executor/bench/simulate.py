"""The scheduler without a model's noise: toys whose steps take a given time, held against the formula.

Real processes, wire and coordinator; only the lanes' arithmetic is a sleep. What is measured and what the
formula says then differ by what scheduling costs.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from executor.bench.ceiling import Counters
from executor.config import Config, Timeouts
from executor.llm import LLM
from executor.request import Acceptance
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    from executor.setting import Mode, Setting

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
    """Tokens per target step and sequence, the median of several runs, and what the formula says."""
    toy = f"vocabulary={_VOCABULARY}"
    draft = f"{toy},agree={plan.acceptance:g},near={plan.near:g},step_ms={plan.draft_ms:g}"
    off = plan.mode == "off"
    config = Config(
        engine="toy",
        target=f"{toy},step_ms={plan.target_ms:g}",
        speculator="off" if off else draft,
        mode="sequential" if plan.mode == "off" else plan.mode,
        num_speculative_tokens=plan.k,
        hypotheses=plan.hypotheses,
        ubatches=plan.ubatches,
        max_sequences=plan.batch,
        threads=1,
        timeouts=Timeouts(draft=_PATIENCE, draft_least=_PATIENCE, hang=_PATIENCE),
    )
    with LLM(config) as llm:
        _run(llm, plan, _WARM_UP_TOKENS)
        before, acceptance, rounds = Counters.of(llm), Acceptance(), []
        for _ in range(plan.repeat):
            acceptance.add(_run(llm, plan, plan.new_tokens))
            rounds.append(_round_ms(llm, plan))
        counters = Counters.of(llm).since(before)
        setting = llm.coordinator.controller.current
    guessed = counters.hits + counters.misses
    hit = counters.hits / guessed if guessed else 0.0
    parts = 2 if setting.ubatches == 2 and plan.batch > 1 else 1
    measured = acceptance.length * plan.target_ms / (parts * statistics.median(rounds))
    says = formula(plan, setting._replace(k=0) if off else setting, acceptance.length, hit)
    return {
        "mode": plan.mode,
        "batch": plan.batch,
        "k": 0 if off else setting.k,
        "n": setting.hypotheses,
        "ubatches": setting.ubatches,
        "acceptance_length": round(acceptance.length, 4),
        "hit_rate": round(hit, 4) if guessed else None,
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


def _round_ms(llm: LLM, plan: Plan) -> float:
    """The mean round while all sequences ran; at the end some are done before others."""
    times = list(llm.coordinator.stats.round_times)[_WARM_UP_ROUNDS:]
    most = max(time.sequences for time in times)
    return statistics.fmean(time.total for time in times if time.sequences == most) / 1e6
