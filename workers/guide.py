"""Grammars that a text has to follow, by llguidance: which tokens may come next."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import llguidance
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_KEPT = 32
"""Compiled grammars; some take a tenth of a second."""


class Guides:
    """The grammars of one lane. Reads the tokenizer when the first one is asked for."""

    def __init__(self, checkpoint: str, vocabulary_size: int) -> None:
        self._checkpoint = Path(checkpoint)
        self._size = vocabulary_size
        self._tokenizers: dict[tuple[int, ...], llguidance.LLTokenizer] = {}
        self._compiled: dict[tuple[str, tuple[int, ...]], llguidance.LLMatcher] = {}

    def guide(self, grammar: str, end_tokens: Sequence[int]) -> Guide:
        """`grammar`: llguidance's own form. `end_tokens`: those that may follow once it is complete."""
        key = grammar, tuple(end_tokens)
        matcher = self._compiled.pop(key, None)
        if matcher is None:
            matcher = llguidance.LLMatcher(self._tokenizer(tuple(end_tokens)), grammar, log_level=0)
        self._compiled[key] = matcher  # the last one used comes last
        if len(self._compiled) > _KEPT:
            del self._compiled[next(iter(self._compiled))]
        return Guide(matcher.deep_copy(), self._size)

    def _tokenizer(self, end_tokens: tuple[int, ...]) -> llguidance.LLTokenizer:
        if end_tokens not in self._tokenizers:
            text = (self._checkpoint / "tokenizer.json").read_text(encoding="utf-8")
            self._tokenizers[end_tokens] = llguidance.LLTokenizer(
                text, n_vocab=self._size, eos_token=list(end_tokens)
            )
        return self._tokenizers[end_tokens]


class Guide:
    """Of one sequence. A grammar that fails allows nothing any more."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary_size: int) -> None:
        self._matcher = matcher
        self._size = vocabulary_size
        self._told: list[int] = []

    def masks(self, generated: Sequence[int], draft: Sequence[int], rows: int) -> list[NDArray[np.bool_]]:
        """bool [V] each: what may follow the last `rows` of the generated tokens and each token of the draft.

        After a draft token that may not stand there the mask before it is given again: those rows are not
        used.
        """
        self._follow(generated)
        taken = 0
        masks: list[NDArray[np.bool_]] = []
        for i in range(len(draft) + 1):
            moved = i == 0
            if i and taken == i - 1:
                moved = self._matcher.try_consume_tokens([draft[i - 1]]) == 1
                taken += moved
            if i >= len(draft) + 1 - rows:
                masks.append(self._mask() if moved or not masks else masks[-1])
        if taken:
            self._matcher.rollback(taken)
        return masks

    def _follow(self, generated: Sequence[int]) -> None:
        """Bring the matcher to the end of the generated tokens, which only grow from call to call."""
        self._matcher.consume_tokens(list(generated[len(self._told) :]))
        self._told.extend(generated[len(self._told) :])

    def _mask(self) -> NDArray[np.bool_]:
        if self._matcher.is_error():
            return np.zeros(self._size, np.bool_)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(words, count=min(self._size, len(words) * 8), bitorder="little")
        return np.pad(bits, (0, self._size - len(bits))).astype(np.bool_)
