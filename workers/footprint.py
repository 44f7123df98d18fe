"""What a model takes of its device's memory, read off the device while it loads and runs its worst shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ipc.messages import MemoryProfile

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from workers.device import Device


class KvNeed(NamedTuple):
    """Bytes per token, tokens per block, and the most tokens that can be of use."""

    bytes_per_token: int
    block: int
    max_tokens: int


class Footprint:
    """Made before a model is loaded, told when it is, asked for a profile once."""

    def __init__(self, device: Device[Any]) -> None:
        self._device = device
        device.forget_peak()
        self._before = device.memory().held
        self._weights = self._load_peak = 0

    def loaded(self) -> None:
        self._device.synchronise()
        self._load_peak = self._device.memory().peak
        self._device.trim()
        self._weights = max(0, self._device.memory().held - self._before)

    def profile(
        self,
        run: Callable[[], None],
        kv: KvNeed,
        workspace: Callable[[], int] = lambda: 0,
        graphs: Callable[[], int] = lambda: 0,
        thrown_away: Callable[[], int] = lambda: 0,
    ) -> MemoryProfile:
        """Run the worst shapes and see how far memory rises; then ask for the bytes of workspace and graphs,
        and of what is there only for the sake of this.

        On a CPU, sizes are of resident memory, so they hold whatever libraries keep for themselves.
        """
        device = self._device
        device.trim()
        device.forget_peak()
        before = device.memory().held
        there = 0 if device.lazy else workspace()
        run()
        device.synchronise()
        after = device.memory()
        beside = after.peak - before - (workspace() - there) - (0 if device.lazy else thrown_away())
        taken, captured = workspace(), graphs()
        return MemoryProfile(
            device=device.name,
            device_id=device.identity,
            process=self._before,
            weights=self._weights,
            activations=max(0, beside),
            workspace=taken,
            graphs=captured,
            load_peak=max(self._load_peak, before),
            kv_bytes_per_token=kv.bytes_per_token,
            kv_block=kv.block,
            max_kv_tokens=kv.max_tokens,
            free=after.free,
            held=after.held,
        )
