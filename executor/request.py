"""One request: what was asked, what is committed, how it ended. Only `executor.commit` adds tokens to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from executor.hidden_rows import KeptRows

if TYPE_CHECKING:
    from executor.errors import SpeclaneError
    from executor.sampling import SamplingParams
    from executor.text import TextStream
    from ipc.messages import QRow, SamplingSpec, TokenLogprobs

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(slots=True)
class Acceptance:
    """How drafts fared: how often a round with so many draft tokens had so many of them accepted."""

    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)

    def record(self, n_drafted: int, n_accepted: int) -> None:
        """One verdict: of `n_drafted` tokens the first `n_accepted` stood, and one more was sampled."""
        outcome = (n_drafted, n_accepted)
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add(self, other: Acceptance) -> None:
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count

    @property
    def rounds(self) -> int:
        return sum(self.outcomes.values())

    @property
    def tokens(self) -> int:
        """Tokens that the verdicts settled: accepted drafts and the target's own."""
        return sum((accepted + 1) * count for (_, accepted), count in self.outcomes.items())

    @property
    def drafted(self) -> list[int]:
        """How many rounds had a draft token at position i, 0-based."""
        longest = max((drafted for drafted, _ in self.outcomes), default=0)
        return [sum(n for (drafted, _), n in self.outcomes.items() if drafted > i) for i in range(longest)]

    @property
    def accepted(self) -> list[int]:
        """In how many of them it stood, and all before it."""
        longest = max((drafted for drafted, _ in self.outcomes), default=0)
        return [sum(n for (_, accepted), n in self.outcomes.items() if accepted > i) for i in range(longest)]

    @property
    def length(self) -> float:
        """Mean tokens per target step: accepted drafts and the target's own token."""
        return self.tokens / self.rounds if self.outcomes else 0.0

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
    prompt_logprobs: list[TokenLogprobs] | None = None
    """One for each token of the prompt but the first, if they were asked for."""

    @property
    def acceptance_length(self) -> float:
        return self.acceptance.length


@dataclass(frozen=True, slots=True)
class Delta:
    """What one round added to a request; text may lag behind the tokens until it is certain.

    logprobs: one for each token, if they were asked for. drafted: so many of the tokens, the first ones, were
    guessed by the speculator; drafted_text: so many characters of the text, the first ones, are theirs.
    prompt_logprobs: only in a request's first delta, and if they were asked for: see Completion.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafted: int = 0
    drafted_text: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None


class Guesses(NamedTuple):
    """A usable draft: its tokens, what they were drawn from, if they were. Of one that was prepared, also how
    many of them should stand, if that is known, and for how many it was asked."""

    tokens: list[int]
    q: list[QRow]
    expected: float | None = None
    k: int = 0


NO_GUESSES = Guesses([], [])


class Verdict(NamedTuple):
    """After `base_len` tokens, so many draft tokens stood and this one followed."""

    base_len: int
    n_accepted: int
    next_token: int


class Outputs(Protocol):
    """Where a request's outputs go. `put` is called in the coordinator's thread: it must not block."""

    def put(self, output: Delta | Completion | SpeclaneError, /) -> None: ...


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
    outputs: Outputs
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    acceptance: Acceptance = field(default_factory=Acceptance)
    cancelled: bool = False
    strikes: int = 0
    """How often in a row the target died while this was being verified; above 0 it is a suspect."""
    draft_strikes: int = 0
    """The same of the speculator and drafting."""
    speculate: bool = True
    pending: bool = False
    """The target has not run all of its history yet."""
    rows: KeptRows = field(default_factory=KeptRows)
    draft: Guesses | None = None
    """What is guessed to follow `tokens`; None if nobody has said so far."""
    prepared: dict[Verdict, Guesses] = field(default_factory=dict)
    """The same for verdicts that may come."""
    asked_len: int = 0
    """The speculator was asked what follows so many tokens, and is not asked twice."""
    prepared_len: int = 0
    """The same of verdicts on the draft after so many tokens."""
    drafted_at: float = 0.0
    """When the speculator last answered about it, monotonic; kept for traces."""
    drafting: bool = False
    """The speculator was asked about it, and its answer may still be of use."""
    verifying: bool = False
    """The target was asked for a verdict."""
    verdict: Verdict | None = None
    """The last one."""

    def unsettled(self) -> None:
        """What was guessed is not of use any more: it starts again from what is committed."""
        self.gen += 1
        self.draft, self.verdict, self.asked_len, self.prepared_len = None, None, 0, 0
        self.prepared.clear()
        self.pending = self.drafting = self.verifying = False

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
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
        )
