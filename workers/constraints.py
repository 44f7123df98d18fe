"""What one sequence may be sampled, position by position: a pure function of its tokens, draft included.

A speculator's draft cannot change it: the row after a draft token is edited as it would be had that token
been committed. Once a draft token could not have been sampled, the rows after it will not be used.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from workers.row_edit import RowEdit

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from ipc.messages import ConstraintSpec, SamplingSpec
    from workers.guide import Guide


class Constraints:
    def __init__(
        self, spec: ConstraintSpec, sampling: SamplingSpec, prompt_len: int, size: int, guide: Guide | None
    ) -> None:
        """`size`: of the vocabulary, V. `guide`: of the grammar, if there is one."""
        self._spec = spec
        self._sampling = sampling
        self._prompt_len = prompt_len
        self._size = size
        self._guide = guide
        self._bias = {token: bias for token, bias in spec.logit_bias if token < size}
        self._allowed = _mask(spec.allowed_token_ids, size) if spec.allowed_token_ids else None
        self._stops = [token for token in sampling.stop_token_ids if token < size]

    def edits(self, tokens: Sequence[int], draft: Sequence[int], rows: int) -> list[RowEdit]:
        """For the last `rows` of the row after `tokens` and those after each token of `draft`."""
        first = len(draft) + 1 - rows
        prompt = set(tokens[: self._prompt_len]) if self._spec.repetition_penalty != 1.0 else set()
        told = [*tokens[self._prompt_len :], *draft[:first]]
        counts = Counter(told) if self._counts_output else Counter[int]()
        edits = []
        for i, mask in enumerate(self._masks(tokens, draft, rows), first):
            if i > first and self._counts_output:
                counts[draft[i - 1]] += 1
            edits.append(self._edit(prompt, counts, mask))
        return edits

    @property
    def _counts_output(self) -> bool:
        spec = self._spec
        return (spec.presence_penalty, spec.frequency_penalty, spec.repetition_penalty) != (0.0, 0.0, 1.0)

    def _edit(self, prompt: set[int], counts: Counter[int], allowed: NDArray[np.bool_] | None) -> RowEdit:
        spec = self._spec
        touched = sorted({*self._bias, *counts, *prompt})
        output = np.array([counts[token] for token in touched], np.float32)
        repeated = np.array([token in counts or token in prompt for token in touched], np.bool_)
        return RowEdit(
            tokens=np.array(touched, np.int64),
            bias=np.array([self._bias.get(token, 0.0) for token in touched], np.float32),
            repetition=np.where(repeated, np.float32(spec.repetition_penalty), np.float32(1.0)),
            penalty=output * np.float32(spec.frequency_penalty)
            + (output > 0).astype(np.float32) * np.float32(spec.presence_penalty),
            allowed=allowed,
        )

    def _masks(
        self, tokens: Sequence[int], draft: Sequence[int], rows: int
    ) -> Iterator[NDArray[np.bool_] | None]:
        """What may be sampled from these rows."""
        guided: Sequence[NDArray[np.bool_] | None] = [None] * rows
        if self._guide is not None:
            guided = self._guide.masks(tokens[self._prompt_len :], draft, rows)
        recent = tokens[-max(map(len, self._spec.bad_words), default=1) :]
        for i, mask in enumerate(guided, len(draft) + 1 - rows):
            generated = len(tokens) + i - self._prompt_len
            yield self._mask(mask, self._banned([*recent, *draft[:i]], generated))

    def _mask(self, guided: NDArray[np.bool_] | None, banned: list[int]) -> NDArray[np.bool_] | None:
        """Something is always allowed. Where a grammar leaves nothing, the text ends; where bans leave
        nothing, they are dropped: a request that contradicts itself must not fail the lane."""
        allowed = self._allowed
        if guided is not None:
            both = guided if allowed is None else guided & allowed
            allowed = both if both.any() else _mask(self._stops, self._size) if self._stops else None
        if not banned:
            return allowed
        left = np.ones(self._size, np.bool_) if allowed is None else allowed.copy()
        left[banned] = False
        return left if left.any() else allowed

    def _banned(self, told: Sequence[int], generated: int) -> list[int]:
        """Stop tokens while the text is too short, and the last token of each bad word that is nearly there.

        `told`: the last tokens, at least as many as the longest bad word has.
        """
        banned = self._stops if generated < self._sampling.min_tokens else []
        words = self._spec.bad_words
        return [
            *banned,
            *(word[-1] for word in words if word[-1] < self._size and _ends_with(told, word[:-1])),
        ]


def _mask(tokens: Sequence[int], size: int) -> NDArray[np.bool_]:
    mask = np.zeros(size, np.bool_)
    mask[[token for token in tokens if token < size]] = True
    return mask


def _ends_with(tokens: Sequence[int], end: Sequence[int]) -> bool:
    return not end or list(tokens[-len(end) :]) == list(end)
