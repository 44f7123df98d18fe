"""POST /v1/completions: prompts in, continuations out."""

from __future__ import annotations

from dataclasses import replace
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
    from ipc.messages import TokenLogprobs

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's own."""
MAX_PROMPTS = 1024


def jobs(llm: LLM, body: CompletionBody) -> list[Job]:
    """All choices of the first prompt, then all of the second … Raises ApiError, InvalidRequest."""
    n = choices(body)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = sampling_params(body, max_tokens, body.logprobs)
    if body.echo and body.logprobs is not None:
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
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
        self._logprobs = body.logprobs
        self._prompt_logprobs = body.prompt_logprobs
        self._said = [0] * len(jobs)
        """Characters of each choice so far, as its tokens are spelled."""
        self._prompts = [job.tokens for job in jobs]
        self._echoes = [text.decode(job.tokens) for job in jobs] if body.echo else None
        self.id = self._envelope.id

    def opening(self, choice: int, first: Delta) -> dict[str, Any] | None:
        if self._echoes is None:
            return None
        chunk = self._chunk(choice, self._echoes[choice])
        if self._logprobs is not None:
            chunk["choices"][0]["logprobs"] = self._lists(
                choice, self._prompts[choice], [None, *(first.prompt_logprobs or ())]
            )
        return chunk

    def delta(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        if not delta.text and self._logprobs is None:
            return None
        chunk = self._chunk(choice, delta.text)
        if self._logprobs is not None:
            chunk["choices"][0]["logprobs"] = self._lists(choice, delta.token_ids, delta.logprobs)
        return chunk

    def closing(self, choice: int, completion: Completion) -> dict[str, Any]:
        return self._chunk(choice, "", completion.finish_reason) | {"metrics": shape.metrics([completion])}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._envelope.usage(completions)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        answers = [self._answer(i, completion) for i, completion in enumerate(completions)]
        return self._envelope.whole(completions, answers)

    def _answer(self, choice: int, completion: Completion) -> dict[str, Any]:
        answer = {
            "index": choice,
            "text": (self._echoes[choice] if self._echoes else "") + completion.text,
            "logprobs": self._all_lists(choice, completion),
            "finish_reason": completion.finish_reason,
        }
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = logprobs.of_prompt(
                *(self._text, completion.prompt_token_ids, completion.prompt_logprobs or ()),
                most=self._prompt_logprobs,
            )
        return answer

    def _all_lists(self, choice: int, completion: Completion) -> dict[str, Any] | None:
        if completion.logprobs is None:
            return None
        tokens, entries = completion.token_ids, [*completion.logprobs]
        if self._echoes is None:
            return self._lists(choice, tokens, entries)
        known = completion.prompt_logprobs or ()
        return self._lists(choice, [*completion.prompt_token_ids, *tokens], [None, *known, *entries])

    def _lists(
        self, choice: int, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]
    ) -> dict[str, Any]:
        """Of the next tokens of a choice."""
        most = self._logprobs or 0
        lists = logprobs.of_completion(self._text, tokens, entries, self._said[choice], most=most)
        self._said[choice] += sum(map(len, lists["tokens"]))
        return lists

    def _chunk(self, choice: int, text: str, reason: str | None = None) -> dict[str, Any]:
        only = {"index": choice, "text": text, "logprobs": None, "finish_reason": reason}
        return self._envelope.around([only])
