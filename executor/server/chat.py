"""POST /v1/chat/completions: a chat in, messages out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from executor.errors import InvalidRequest
from executor.sampling import SamplingParams
from executor.server import logprobs, shape
from executor.server.errors import refuse
from executor.server.generation import Job
from executor.server.params import choices, for_choice, sampling_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.llm import LLM
    from executor.model import ModelText
    from executor.request import Completion, Delta
    from executor.server.bodies import ChatBody

_MOST_TOKENS = 1 << 31
_KEYS = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal"),
    "reasoning_content",
)
"""Of messages. What of them a template must have a place for, the model's text says."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def jobs(llm: LLM, body: ChatBody) -> list[Job]:
    """Raises ApiError, InvalidRequest."""
    n = choices(body)
    messages = [message(i, sent) for i, sent in enumerate(body.messages)]
    if not messages:
        refuse("messages", 'messages is empty; try [{"role": "user", "content": "hello"}]')
    tools = [tool(i, sent) for i, sent in enumerate(body.tools or ())]
    if body.tool_choice == "none":
        tools = []
    try:
        tokens = llm.encode_chat(messages, SamplingParams(), tools=tools)
        max_tokens = _max_tokens(body, llm.max_model_len - len(tokens))
        params = sampling_params(body, max_tokens, _alternatives(body))
        llm.encode(tokens, params)
    except InvalidRequest as error:
        if error.field == "prompt":  # there is no such field here
            raise InvalidRequest("messages", str(error)) from None
        raise
    return [Job(tokens, for_choice(params, i)) for i in range(n)]


class ChatShape:
    def __init__(self, body: ChatBody, text: ModelText, model: str) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._envelope = shape.Envelope("chatcmpl", kind, model, choices(body))
        self._text = text
        self._logprobs = bool(body.logprobs)
        self.id = self._envelope.id

    def opening(self, choice: int, first: Delta) -> dict[str, Any] | None:
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def delta(self, choice: int, delta: Delta) -> dict[str, Any] | None:
        if not delta.text and not self._logprobs:
            return None
        chunk = self._chunk(choice, {"content": delta.text})
        if self._logprobs:
            content = logprobs.of_chat(self._text, delta.token_ids, delta.logprobs)
            chunk["choices"][0]["logprobs"] = content
        return chunk

    def closing(self, choice: int, completion: Completion) -> dict[str, Any]:
        return self._chunk(choice, {}, completion.finish_reason) | {"metrics": shape.metrics([completion])}

    def usage(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._envelope.usage(completions)

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        answers = [self._answer(i, completion) for i, completion in enumerate(completions)]
        whole = self._envelope.whole(completions, answers)
        if (entries := completions[0].prompt_logprobs) is not None:  # all answer the same prompt
            whole["prompt_logprobs"] = logprobs.of_prompt(
                self._text, completions[0].prompt_token_ids, entries
            )
        return whole

    def _answer(self, choice: int, completion: Completion) -> dict[str, Any]:
        entries = completion.logprobs
        return {
            "index": choice,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": None
            if entries is None
            else logprobs.of_chat(self._text, completion.token_ids, entries),
            "finish_reason": completion.finish_reason,
        }

    def _chunk(self, choice: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        only = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._envelope.around([only])


def _max_tokens(body: ChatBody, room: int) -> int:
    """`room`: what is left of the context, which is also what no limit means."""
    newer = body.max_completion_tokens
    if newer is not None and not 1 <= newer <= _MOST_TOKENS:
        refuse(
            "max_completion_tokens",
            f"max_completion_tokens must be from 1 to {_MOST_TOKENS}, got {newer}; try 128",
        )
    if None not in (body.max_tokens, newer) and body.max_tokens != newer:
        refuse("max_tokens", "max_tokens contradicts max_completion_tokens; leave one of them out")
    given = body.max_tokens if newer is None else newer
    return max(1, room) if given is None else given


def _alternatives(body: ChatBody) -> int | None:
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    if not body.logprobs:
        refuse("top_logprobs", "top_logprobs is for requests with logprobs; add logprobs: true")
    if not 0 <= body.top_logprobs <= 20:
        refuse("top_logprobs", f"top_logprobs must be from 0 to 20, got {body.top_logprobs}; try 5")
    return body.top_logprobs


def message(i: int, sent: dict[str, Any]) -> dict[str, Any]:
    """A message as a template reads it: content that comes in parts is joined."""
    where = f"messages[{i}]"
    role, content = sent.get("role"), sent.get("content")
    if role not in _ROLES:
        refuse(f"{where}.role", f"{where}.role must be one of {', '.join(_ROLES)}, got {role!r}; try user")
    if isinstance(content, list):
        content = "".join(_part(f"{where}.content[{j}]", part) for j, part in enumerate(content))
    elif content is not None and not isinstance(content, str):
        refuse(f"{where}.content", f"{where}.content must be text or a list of parts, got {content!r:.80}")
    for key in sent:
        if key not in _KEYS and sent[key] is not None:
            refuse(f"{where}.{key}", f"{where}.{key} is not known here; leave it out", code="unknown_field")
    return sent | {"content": content}


def tool(i: int, sent: dict[str, Any]) -> dict[str, Any]:
    """A tool as a template reads it."""
    function = sent.get("function")
    named = isinstance(function, dict) and isinstance(function.get("name"), str)
    if sent.get("type") != "function" or not named:
        works = '{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}'
        refuse(f"tools[{i}]", f"tools[{i}] must be a function with a name; try {works}")
    return sent


def _part(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        refuse(where, f'{where} must be {{"type": "text", "text": …}}; this model reads only text')
    text: str = part["text"]
    return text
