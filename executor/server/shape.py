"""What answers have in common, whatever the endpoint: their envelope, usage and acceptance."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, Protocol

from executor.request import Acceptance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.request import Completion, Delta


class Shape(Protocol):
    """How an endpoint spells an answer. `choice` counts from 0. `id` is the client's name for it."""

    id: str

    def opening(self, choice: int, first: Delta) -> dict[str, Any] | None:
        """The chunk before the first delta of a choice."""
        ...

    def delta(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        """The chunk of a delta; None if it says nothing yet."""
        ...

    def closing(self, choice: int, completion: Completion) -> dict[str, Any]: ...

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]: ...

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The chunk at the end of a stream that was asked to say what it used."""
        ...


class Envelope:
    """The outer fields of each object of one answer."""

    def __init__(self, prefix: str, kind: str, model: str, n: int) -> None:
        """`n`: how many choices there are to each prompt."""
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._n = n
        self._fields = {"id": self.id, "object": kind, "created": int(time.time()), "model": model}

    def around(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._fields | {"choices": choices}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The last chunk of a stream that was asked to say what it used."""
        return self.around([]) | {"usage": self.counts(completions)}

    def whole(self, completions: Sequence[Completion], choices: list[dict[str, Any]]) -> dict[str, Any]:
        """All of an answer; `choices`: its completions as the endpoint spells them."""
        told = {"usage": self.counts(completions), "metrics": metrics(completions)}
        return self.around(choices) | told

    def counts(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """Tokens used; a prompt counts once, however many choices there are to it."""
        prompt = sum(len(completion.prompt_token_ids) for completion in completions[:: self._n])
        generated = sum(len(completion.token_ids) for completion in completions)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
        }


def metrics(completions: Sequence[Completion]) -> dict[str, Any]:
    """How the drafts of an answer fared; ours, beside OpenAI's fields."""
    acceptance = Acceptance()
    for completion in completions:
        acceptance.add(completion.acceptance)
    drafted, accepted = acceptance.drafted, acceptance.accepted
    return {
        "speculative_decoding": {
            "num_drafts": drafted[0] if drafted else 0,
            "num_draft_tokens": sum(drafted),
            "num_accepted_tokens": sum(accepted),
            "num_accepted_tokens_per_pos": [*accepted, *[0] * (len(drafted) - len(accepted))],
            "mean_acceptance_length": round(acceptance.length, 4),
        }
    }


def acceptance_of(delta: Delta) -> dict[str, int]:
    """How much of a delta the speculator had guessed, from its start."""
    return {"tokens": delta.drafted, "characters": delta.drafted_text}
