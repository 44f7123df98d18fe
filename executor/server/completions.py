"""POST /v1/completions: prompts in, continuations out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executor.server import logprobs, shape
from executor.server.errors import refuse
from executor.server.generation import Job
from executor.server.params import choices, for_choice, sampling_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.llm import LLM
    from executor.model import ModelText
    from executor.request import Completion, Delta
    from executor.server.bodies import CompletionBody

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""
MAX_PROMPTS = 1024


def jobs(llm: LLM, body: CompletionBody) -> list[Job]:
    """All choices of the first prompt, then all of the second … Raises ApiError, InvalidRequest."""
    n = choices(body)
    if body.echo and body.logprobs is not None:
        refuse("echo", "echo with logprobs is not supported; leave one of them out", code="unsupported_field")
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, max_tokens, body.logprobs)
    encoded = [llm.encode(prompt, params) for prompt in _prompts(body.prompt)]
    return [Job(tokens, for_choice(params, i)) for tokens in encoded for i in range(n)]


def _prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """One text, several, the tokens of one, or of several. What the tokens are is checked with the prompt."""
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        refuse("prompt", f"prompt may have {MAX_PROMPTS} texts, got {len(prompt)}; send them in parts")
    if kinds == {str} or (kinds == {list} and all(type(token) is int for part in prompt for token in part)):
        return prompt
    refuse("prompt", "prompt must be a text, a list of texts, token ids or a list of lists of them; try 'hi'")


class CompletionShape:
    def __init__(self, body: CompletionBody, text: ModelText, model: str, jobs: Sequence[Job]) -> None:
        self._envelope = shape.Envelope("cmpl", "text_completion", model, choices(body))
        self._text = text
        self._logprobs = body.logprobs is not None
        self._said = [0] * len(jobs)
        """Characters of each choice so far, as its tokens are spelled."""
        self._echoes = [text.decode(job.tokens) for job in jobs] if body.echo else None
        self.id = self._envelope.id

    def opening(self, choice: int) -> dict[str, Any] | None:
        return None if self._echoes is None else self._chunk(choice, self._echoes[choice])

    def delta(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        if not delta.text and not self._logprobs:
            return None
        chunk = self._chunk(choice, delta.text)
        if self._logprobs:
            lists = logprobs.of_completion(self._text, delta.token_ids, delta.logprobs, self._said[choice])
            self._said[choice] += sum(map(len, lists["tokens"]))
            chunk["choices"][0]["logprobs"] = lists
        return chunk

    def closing(self, choice: int, completion: Completion) -> dict[str, Any]:
        return self._chunk(choice, "", completion.finish_reason) | {"metrics": shape.metrics([completion])}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._envelope.usage(completions)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        answers = [self._answer(i, completion) for i, completion in enumerate(completions)]
        return self._envelope.whole(completions, answers)

    def _answer(self, choice: int, completion: Completion) -> dict[str, Any]:
        entries = completion.logprobs
        return {
            "index": choice,
            "text": (self._echoes[choice] if self._echoes else "") + completion.text,
            "logprobs": None
            if entries is None
            else logprobs.of_completion(self._text, completion.token_ids, entries, 0),
            "finish_reason": completion.finish_reason,
        }

    def _chunk(self, choice: int, text: str, reason: str | None = None) -> dict[str, Any]:
        only = {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}
        return self._envelope.around([only])
