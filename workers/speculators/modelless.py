"""What speculators without a model say of themselves: they yield only tokens that they were given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ipc.messages import Vocabulary
from workers.engines.weightless import Weightless

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import LaneSpec
    from workers.speculator import News

_BRANCHES = 1 << 20


class ModellessSpeculator(Weightless):
    prefers_fresh = False

    def __init__(self, spec: LaneSpec, bytes_per_token: int) -> None:
        super().__init__(spec, spec.max_model_len, bytes_per_token)
        self._max_model_len = spec.max_model_len
        self._notes: list[str] = []

    @property
    def served(self) -> Self:
        return self

    def room(self, length: int) -> int:
        """A branch of a lookup is a few tokens."""
        return _BRANCHES

    def observe(self, news: Sequence[News]) -> None:
        """Sees tokens only when it is asked what follows them."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(size=0, fingerprint="")

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def notes(self) -> list[str]:
        return list(self._notes)
