"""What a caller may ask of one request, checked where it enters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from executor.errors import InvalidRequest
from executor.grammar import Grammar


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one request.

    temperature: 0 is greedy. Otherwise logits are divided by it before top_k, top_p and min_p are applied.
    top_p: keep the smallest set of most probable tokens with at least this mass, 0 < top_p ≤ 1.
    top_k: keep the k most probable tokens; 0 keeps all.
    min_p: keep tokens with at least this share of the best token's probability, 0 ≤ min_p ≤ 1.
    seed: same seed, same tokens, with or without speculation if acceptance is coupled; None draws one.
    max_tokens: generate at most so many.
    min_tokens: no stop token or stop string ends the text before so many.
    stop: strings that end the text; they are not part of it.
    stop_token_ids: tokens that end the text, beside the model's own end-of-text tokens.
    ignore_eos: the model's own end-of-text tokens do not end the text.
    presence_penalty, frequency_penalty: taken from the logit of each token that the text has already, once,
        and once per occurrence; -2 … 2.
    repetition_penalty: divides positive logits of tokens in prompt or text, multiplies others; 1 is none.
    logit_bias: by token id, what is added to its logit; -100 … 100.
    allowed_token_ids: nothing else is sampled; None allows all.
    bad_words: texts that do not come about, at the start of a word or within one.
    grammar: the form that the text must have. Once it has it, the text ends, whatever ignore_eos says.
    logprobs: report the log-probability of each token and of so many alternatives (0 … 20); None: no report.
    prompt_logprobs: the same for the tokens of the prompt, all but the first. The prompt is then always run.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = field(default=())
    stop_token_ids: tuple[int, ...] = field(default=())
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = field(default=())
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest naming the field."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", _several("stop", stop, "a list of strings", "'\\n\\n'"))
        stop_ids = _several("stop_token_ids", self.stop_token_ids, "a list of token ids", "[2]")
        object.__setattr__(self, "stop_token_ids", stop_ids)
        _number("temperature", self.temperature, 0.0, 100.0, "0.8, or 0 for greedy")
        _number("top_p", self.top_p, 0.0, 1.0, "0.95", open_below=True)
        _number("min_p", self.min_p, 0.0, 1.0, "0.05")
        _integer("top_k", self.top_k, 0, 1 << 31, "50, or 0 for all tokens")
        if self.seed is not None:
            _integer("seed", self.seed, 0, (1 << 63) - 1, "42")
        _integer("max_tokens", self.max_tokens, 1, 1 << 31, "128")
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens, str(self.max_tokens), " (max_tokens)")
        for name in ("logprobs", "prompt_logprobs"):
            if (wanted := getattr(self, name)) is not None:
                _integer(name, wanted, 0, 20, "5")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequest(
                "ignore_eos", f"ignore_eos must be True or False, got {self.ignore_eos!r}; try True"
            )
        _texts("stop", "stop strings", self.stop, "'\\n\\n'")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 1 << 31, "2")
        self._check_constraints()

    @property
    def constrained(self) -> bool:
        """Whether anything but temperature, filters and stops decides what is sampled."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)
        others = self.logit_bias, self.bad_words, self.allowed_token_ids, self.grammar
        return penalties or any(others)

    def _check_constraints(self) -> None:
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0, "0.5, or 0 for none")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "0.5, or 0 for none")
        _number(
            "repetition_penalty", self.repetition_penalty, 0.0, 10.0, "1.1, or 1 for none", open_below=True
        )
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequest(
                "logit_bias",
                f"logit_bias must map token ids to numbers, got {self.logit_bias!r}; try {{2: -100}}",
            )
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 1 << 31, "{2: -100}")
            _number("logit_bias", bias, -100.0, 100.0, "{2: -100}")
        if self.allowed_token_ids is not None:
            allowed = _several("allowed_token_ids", self.allowed_token_ids, "a list of token ids", "[1, 2]")
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not allowed:
                raise InvalidRequest(
                    "allowed_token_ids",
                    "allowed_token_ids is empty; try [1, 2], or leave it out to allow all",
                )
            for token in allowed:
                _integer("allowed_token_ids", token, 0, 1 << 31, "2")
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        object.__setattr__(self, "bad_words", _several("bad_words", words, "a list of texts", "['maybe']"))
        _texts("bad_words", "bad words", self.bad_words, "'maybe'")
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise InvalidRequest(
                "grammar", f"grammar must be a Grammar, got {self.grammar!r}; try Grammar('regex', '[0-9]+')"
            )


def _number(
    name: str, value: float, low: float, high: float, works: str, *, open_below: bool = False
) -> None:
    bad = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    if bad or not low <= value <= high or (open_below and value == low):
        bracket = "above" if open_below else "at least"
        raise InvalidRequest(
            name, f"{name} must be {bracket} {low:g} and at most {high:g}, got {value!r}; try {works}"
        )


def _integer(name: str, value: int, low: int, high: int, works: str, bound: str = "") -> None:
    """`bound`: where the upper one comes from."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(
            name, f"{name} must be a whole number from {low} to {high}{bound}, got {value!r}; try {works}"
        )


def _texts(name: str, what: str, texts: Iterable[object], works: str) -> None:
    for text in texts:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(name, f"{what} must be non-empty text, got {text!r}; try {works}")


def _several(name: str, value: object, what: str, works: str) -> tuple[Any, ...]:
    """The values as a tuple; None is none."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidRequest(name, f"{name} must be {what}, got {value!r}; try {works}")
    return tuple(value)
