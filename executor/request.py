"""One request: what was asked, what is committed, how it ended. Only `executor.commit` adds tokens to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from queue import SimpleQueue

    from executor.errors import SpeclaneError
    from executor.sampling import SamplingParams
    from executor.text import TextStream
    from ipc.messages import SamplingSpec, TokenLogprobs

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Acceptance:
    """How drafts fared. Position i counts the i-th draft token of a round, 0-based."""

    rounds: int = 0
    tokens: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """One verdict: of `n_drafted` tokens the first `n_accepted` stood, and one more was sampled."""
        self.rounds += 1
        self.tokens += n_accepted + 1
        grow = n_drafted - len(self.drafted)
        if grow > 0:
            self.drafted += [0] * grow
            self.accepted += [0] * grow
        for i in range(n_drafted):
            self.drafted[i] += 1
            self.accepted[i] += i < n_accepted

    def add(self, other: Acceptance) -> None:
        self.rounds += other.rounds
        self.tokens += other.tokens
        for mine, theirs in ((self.drafted, other.drafted), (self.accepted, other.accepted)):
            mine += [0] * (len(theirs) - len(mine))
            for i, count in enumerate(theirs):
                mine[i] += count

    @property
    def length(self) -> float:
        """Mean tokens per target step: accepted drafts and the target's own token."""
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def by_position(self) -> list[float]:
        """Share of the rounds with a draft token at position i in which it, and all before it, stood."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True)]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    seed: int
    acceptance: Acceptance
    logprobs: list[TokenLogprobs] | None

    @property
    def acceptance_length(self) -> float:
        return self.acceptance.length


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round added to a request; text may lag behind the tokens until it is certain."""

    text: str
    token_ids: list[int]


@dataclass(slots=True, eq=False)
class Request:
    """`tokens` are all committed ones, prompt included; any of `spec.stop_token_ids` ends the text."""

    seq: int
    gen: int
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    spec: SamplingSpec
    text: TextStream
    outputs: SimpleQueue[Delta | Completion | SpeclaneError]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    cancelled: bool = False

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_len

    def completion(self) -> Completion:
        assert self.finish_reason is not None, "only a finished request has a completion"
        return Completion(
            prompt_token_ids=self.tokens[: self.prompt_len],
            token_ids=self.tokens[self.prompt_len :],
            text=self.text.text,
            finish_reason=self.finish_reason,
            seed=self.spec.seed,
            acceptance=self.acceptance,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
        )
