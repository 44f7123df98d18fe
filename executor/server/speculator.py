"""What drafts on the served executor: shown, exchanged, turned off and on. One exchange at a time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec

from executor.server.errors import ApiError, refuse

if TYPE_CHECKING:
    from executor.llm import LLM
    from executor.server.bodies import SpeculatorBody


class SpeculatorSwitch:
    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._last_on = llm.speculation if llm.speculation != "off" else "ngram"
        self._busy = False

    def state(self) -> dict[str, Any]:
        status = self._llm.status()
        lanes = [msgspec.structs.asdict(lane) for lane in status.lanes if lane.lane == "speculator"]
        return {
            "object": "speculator",
            "model": status.speculation,
            "enabled": status.speculation != "off",
            "changing": self._busy,
            "num_speculative_tokens": self._llm.config.num_speculative_tokens,
            "lane": lanes[0] if lanes else None,
        }

    async def change(self, body: SpeculatorBody) -> dict[str, Any]:
        """Returns when the new one serves. Raises ApiError, or what LLM.swap_speculator does."""
        if (not body.model) == (body.enabled is None):
            refuse("model", 'send either {"model": "ngram"} or {"enabled": false}')
        model = body.model or (self._last_on if body.enabled else "off")
        if self._busy:
            raise ApiError(409, "another change is under way; try again when it is done", code="busy")
        self._busy = True
        try:
            await asyncio.to_thread(self._llm.swap_speculator, model)
        finally:
            self._busy = False
        if model != "off":
            self._last_on = model
        return self.state()
