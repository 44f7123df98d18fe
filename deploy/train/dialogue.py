"""One conversation as it is written token by token: what is said for the user, and where the target speaks.

Knows the chat's markers as token ids, no tensors. In half of the conversations the target also makes up the
user's part: given the header of a user's turn, a chat model writes a question of the kind it was trained on.
"""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from prompts import Prompts

TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 1.0)
"""Of answers, one for a whole conversation: most drafts are for greedy and cautious ones."""
VARIED = (0.0, 0.7, 0.8, 0.8, 1.0)
"""The same where the text is not for learning but for counting: greedy text says the same things again."""
_MAX_TURN = 400


class Markup(NamedTuple):
    """Token ids of the template's parts. `start`: all up to the first user's turn."""

    start: list[int]
    user: list[int]
    assistant: list[int]
    end: int
    newline: list[int]


class Dialogue:
    def __init__(
        self,
        markup: Markup,
        prompts: Prompts,
        encode: Callable[[str], list[int]],
        seed: str,
        *,
        temperature: float | None = None,
        self_asked: float = 0.5,
        temperatures: Sequence[float] = TEMPERATURES,
    ) -> None:
        """`self_asked`: probability that the target writes the user's part, too. `temperature`, if given, or
        one of `temperatures` is that of answers."""
        chance = random.Random(seed)
        self._markup = markup
        self._prompts = prompts
        self._encode = encode
        self._answering = chance.choice(temperatures) if temperature is None else temperature
        self._self_asked = chance.random() < self_asked
        self._forced = deque(markup.start)
        self._speaks = ""
        self._said = 0
        self.category = ""
        self.temperature = self._answering
        self._next_turn()

    def step(self, sampled: int) -> tuple[int, bool]:
        """The next token and whether the target wrote it; `sampled` is what it would say after the last."""
        if self._forced:
            return self._forced.popleft(), False
        self._said += 1
        if sampled == self._markup.end or self._said > _MAX_TURN:
            self._forced.extend(self._markup.newline)
            self._next_turn()
            return self._markup.end, sampled == self._markup.end
        return sampled, True

    def _next_turn(self) -> None:
        self._said = 0
        if self._speaks == "user":
            self._answer()
            return
        self._forced.extend(self._markup.user)
        if self._self_asked:
            self._speaks, self.temperature = "user", 1.0
            return
        self.category, question = self._prompts.draw()
        self._forced.extend([*self._encode(question), self._markup.end, *self._markup.newline])
        self._answer()

    def _answer(self) -> None:
        self._forced.extend(self._markup.assistant)
        self._speaks, self.temperature = "assistant", self._answering
