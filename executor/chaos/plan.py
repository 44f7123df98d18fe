"""What a chaos run does: requests, faults, and when each strikes. Pure and seeded; knows no processes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from executor.errors import InvalidRequest
from executor.restart import RestartPolicy
from executor.sampling import SamplingParams

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

    from executor.config import Config
    from executor.llm import LLM
    from ipc.messages import LaneName

RESTARTS = RestartPolicy(intensity=1_000_000, backoff=0.05, backoff_max=0.5)
"""Lanes are killed on purpose here, so none is ever given up for it."""
STRIKES = 100
"""For the same reason no request is blamed for a target that died over it."""
MIN_ANSWER = 8

_FAULTED_SHARE = 0.9
"""The last tokens of a round are left alone, so that most of its faults strike in the same round."""
_PROMPT_WORDS = (3, 12, 48, 160)
_WORDS = (
    *("the", "lane", "a", "target", "draft", "and", "token", "waits", "for", "its", "speculator", "when"),
    *("one", "falls", "silent", "another", "counts", "every", "river", "seven", "copies", "of", "that"),
)


class Job(NamedTuple):
    """One request: token ids of its prompt, and its sampling."""

    prompt: list[int]
    params: SamplingParams


class FaultKind(NamedTuple):
    lane: LaneName
    signal: signal.Signals


class Fault(NamedTuple):
    """Due as soon as so many tokens have been committed since the start of the run."""

    at: int
    kind: FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`requests`: of a round of traffic. `faults`: how many of each kind are spread over a round; those that
    find their lane down strike in the rounds after it.

    max_tokens: of the longest answers; the shortest have a quarter of it.
    minutes: until they have passed, rounds go on and faults are spread anew; 0 is once.
    """

    config: Config
    requests: int
    max_tokens: int
    temperature: float
    seed: int
    faults: Mapping[FaultKind, int] = field(default_factory=dict)
    minutes: float = 0.0


def make_jobs(llm: LLM, plan: Plan) -> list[Job]:
    """Prompts and answers of mixed lengths. Raises InvalidRequest if the context has no room for them."""
    room = llm.max_model_len - plan.max_tokens
    if room < 1:
        raise InvalidRequest(
            "max_tokens",
            f"max_tokens {plan.max_tokens} leaves no room for a prompt in a context of {llm.max_model_len}; "
            f"try {llm.max_model_len // 2}",
        )
    rng = random.Random(plan.seed)
    jobs = []
    for i in range(plan.requests):
        words = rng.choice(_PROMPT_WORDS)
        text = " ".join(rng.choices(_WORDS, k=rng.randint(-(-words // 2), words)))
        prompt = llm.encode(text[:room])[:room]  # a token is at least one of these characters
        max_tokens = rng.randint(-(-plan.max_tokens // 4), plan.max_tokens)
        params = SamplingParams(
            temperature=plan.temperature, seed=plan.seed + i, max_tokens=max_tokens, ignore_eos=True
        )
        jobs.append(Job(prompt, params))
    return jobs


def make_faults(plan: Plan, round_number: int, start: int, tokens: int) -> list[Fault]:
    """One round's faults in random order, one in each equal part of `tokens` from token `start` on."""
    rng = random.Random(f"{plan.seed} {round_number}")
    kinds = [kind for kind, count in plan.faults.items() for _ in range(count)]
    rng.shuffle(kinds)
    part = tokens * _FAULTED_SHARE / max(1, len(kinds))
    return [Fault(start + 1 + int((i + rng.random()) * part), kind) for i, kind in enumerate(kinds)]
