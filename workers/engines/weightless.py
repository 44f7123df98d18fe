"""The steps of a start, for what has neither weights nor tensors: little to do, but planned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.blocks import BLOCK, BlockPool, blocks_for
from workers.device import Cpu
from workers.footprint import Footprint, KvNeed

if TYPE_CHECKING:
    from ipc.messages import LaneSpec, MemoryProfile, StepTime


class Weightless:
    """Base of the toy engine and of speculators that look tokens up."""

    device_id = Cpu.identity
    pass_tokens = 0

    def __init__(self, spec: LaneSpec, max_model_len: int, bytes_per_token: int) -> None:
        """`bytes_per_token`: what a held token takes; `max_model_len` in tokens."""
        self._footprint = Footprint(Cpu())
        self._reuses = spec.reuse_prefixes
        self._need = KvNeed(bytes_per_token, BLOCK, spec.max_sequences * blocks_for(max_model_len) * BLOCK)
        self.allocate(self._need.max_tokens)

    @property
    def step_times(self) -> list[StepTime]:
        return []

    @property
    def reused_tokens(self) -> int:
        return self.pool.reused_tokens

    def set_up_attention(self) -> None:
        """Attends to nothing."""

    def profile(self) -> MemoryProfile:
        return self._footprint.profile(lambda: None, self._need)

    def allocate(self, kv_tokens: int) -> None:
        self.pool = BlockPool(kv_tokens // BLOCK, reuse=self._reuses)

    def warm_up(self) -> None:
        """Its first step is as fast as its others."""

    def capture(self) -> str:
        return "none"

    def lock(self) -> None:
        """Holds no workspace."""
