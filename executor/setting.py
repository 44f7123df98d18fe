"""How sequences are speculated for: how far, how far ahead, and in how many parts. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

Mode = Literal["auto", "sequential", "ahead", "outcomes"]
MAX_HYPOTHESES = 64


class Setting(NamedTuple):
    """k: longest draft in tokens, 0 for none. hypotheses: for how many verdicts on a draft that is being
    verified the next one is prepared, N. ubatches: in how many parts sequences take turns, 1 or 2: with 2,
    one is verified while the other is drafted for."""

    k: int
    hypotheses: int = 0
    ubatches: int = 1

    def __str__(self) -> str:
        if self.k == 0:
            return "off"
        parts = f"K={self.k}, N={self.hypotheses}"
        return f"{parts}, two ubatches" if self.ubatches > 1 else parts


def setting_for(mode: Mode, k: int, hypotheses: int | None, ubatches: int | None) -> Setting:
    """What a mode means where nothing else is said; for `auto`, the most that may be used."""
    usual = {"sequential": 0, "ahead": 1}.get(mode, min(2 * (k + 1), MAX_HYPOTHESES))
    return Setting(
        k,
        usual if hypotheses is None else hypotheses,
        ubatches or (2 if mode == "auto" else 1),
    )
