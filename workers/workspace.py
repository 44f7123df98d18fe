"""Scratch storage of one lane: a growable byte arena per ubatch; every call gets views from offset 0.

The ownership rule: storage belongs to (ubatch, lane). A lane makes its own workspace and hands it to nobody,
and the ubatch is an argument of every call, since ambient state is lost in new threads. Growth of one arena
replaces its storage, so that views and captured graphs of it are stale; no other arena is touched. Once
graphs are captured, `lock` forbids growth. Knows no model and no tensor library: a device makes the views.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from workers.device import Allocator, Storage

ALIGNMENT = 256
POISON_VARIABLE = "SPECLANE_POISON"
"""Set to 1, storage that was returned is filled with what no float, index or mask survives."""
_POISON = 0xFF

V = TypeVar("V")


class ElementType(Protocol):
    """Such as a torch.dtype."""

    @property
    def itemsize(self) -> int: ...


class Spec(NamedTuple):
    """The shape and type of a view."""

    shape: tuple[int, ...]
    dtype: ElementType

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WorkspaceLocked(MemoryError):
    """Something asked for storage after the lock, when captured graphs rely on what there is."""


class StaleView(RuntimeError):
    """Views were used after the next call had got the same storage, or after it was replaced."""


class Taken(Generic[V]):
    """The views of one call. They may be used until the next call with the same ubatch."""

    __slots__ = ("_arena", "_call", "_views")

    def __init__(self, arena: _Arena[V], views: tuple[V, ...]) -> None:
        self._arena = arena
        self._call = arena.calls
        self._views = views

    @property
    def views(self) -> tuple[V, ...]:
        """Raises StaleView if somebody else has the storage now."""
        if self._call != self._arena.calls:
            raise StaleView(
                f"{self._arena.name}: views of call {self._call} used in call {self._arena.calls}"
            )
        return self._views

    def __iter__(self) -> Iterator[V]:
        return iter(self.views)

    def __getitem__(self, index: int) -> V:
        return self.views[index]


class _Arena(Generic[V]):
    """The storage of one ubatch. `generation` counts storages, `calls` the calls that got views."""

    def __init__(self, device: Allocator[V], name: str) -> None:
        self._device = device
        self.name = name
        self.storage: Storage[V] | None = None
        self.kept: dict[str, tuple[Spec, Storage[V]]] = {}
        self.generation = 0
        self.calls = 0

    @property
    def size(self) -> int:
        return 0 if self.storage is None else self.storage.nbytes

    @property
    def nbytes(self) -> int:
        return self.size + sum(storage.nbytes for _, storage in self.kept.values())

    def grow(self, nbytes: int) -> None:
        """The old storage goes first, so that no device has to hold both."""
        old, self.storage = self.storage, None
        if old is not None:
            self._device.free(old)
        self.storage = self._device.allocate(nbytes)
        self.generation += 1
        self.calls += 1

    def view(self, specs: tuple[Spec, ...]) -> tuple[V, ...]:
        assert self.storage is not None, "nothing is viewed before it is there"
        views, offset = [], 0
        for spec in specs:
            views.append(self.storage.view(offset, spec))
            offset += aligned(spec.nbytes)
        return tuple(views)


class Workspace(Generic[V]):
    """One per lane. `ubatch` numbers the slices of a batch that may be in work at the same time."""

    def __init__(self, device: Allocator[V], lane: str, *, poison: bool | None = None) -> None:
        """`poison`: None asks the environment (POISON_VARIABLE)."""
        self._device = device
        self._lane = lane
        self._poison = os.environ.get(POISON_VARIABLE) == "1" if poison is None else poison
        self._arenas: dict[int, _Arena[V]] = {}
        self._locked = False

    def take(self, ubatch: int, caller: str, *specs: Spec) -> Taken[V]:
        """Views of these specs that live together; their content is undefined. Earlier ones are stale now.

        Raises WorkspaceLocked if they need more than there is, after the lock.
        """
        arena = self._room(ubatch, caller, sum(aligned(spec.nbytes) for spec in specs))
        arena.calls += 1
        if self._poison and arena.storage is not None:
            arena.storage.fill(_POISON)
        return Taken(arena, arena.view(specs))

    def reserve(self, ubatch: int, caller: str, *specs: Spec) -> None:
        """Make sure that `take` of these specs will not grow. Raises WorkspaceLocked."""
        self._room(ubatch, caller, sum(aligned(spec.nbytes) for spec in specs))

    def keep(self, ubatch: int, caller: str, name: str, spec: Spec) -> V:
        """A view of storage of its own, which no call and no growth touches; the same for the same name.

        Raises WorkspaceLocked for a new one after the lock, ValueError for another spec than before.
        """
        arena = self._arena(ubatch)
        if name not in arena.kept:
            if self._locked:
                raise self._refusal(ubatch, f"{caller}, for {name},", spec.nbytes, 0)
            arena.kept[name] = spec, self._device.allocate(aligned(spec.nbytes))
        before, storage = arena.kept[name]
        if before != spec:
            raise ValueError(f"{arena.name}: {name} is kept as {before}, {caller} wants {spec}")
        return storage.view(0, spec)

    def lock(self) -> None:
        """From now on no storage grows, moves or is added."""
        self._locked = True

    @property
    def locked(self) -> bool:
        return self._locked

    def address(self, ubatch: int) -> int:
        """Where views begin; graphs rely on it. 0 if there is no storage yet."""
        storage = self._arena(ubatch).storage
        return 0 if storage is None else storage.address

    def generation(self, ubatch: int) -> int:
        """How often the storage was made anew; what was captured before the last time is stale."""
        return self._arena(ubatch).generation

    @property
    def nbytes(self) -> int:
        """Of all ubatches, kept storage included."""
        return sum(arena.nbytes for arena in self._arenas.values())

    def _arena(self, ubatch: int) -> _Arena[V]:
        arena = self._arenas.get(ubatch)
        if arena is None:
            name = f"workspace of the {self._lane}, ubatch {ubatch}"
            arena = self._arenas.setdefault(ubatch, _Arena(self._device, name))
        return arena

    def _room(self, ubatch: int, caller: str, nbytes: int) -> _Arena[V]:
        arena = self._arena(ubatch)
        if nbytes > arena.size or arena.storage is None:
            if self._locked:
                raise self._refusal(ubatch, caller, nbytes, arena.size)
            if self._poison and arena.storage is not None:
                arena.storage.fill(_POISON)
            arena.grow(nbytes)
        return arena

    def _refusal(self, ubatch: int, caller: str, need: int, size: int) -> WorkspaceLocked:
        return WorkspaceLocked(
            f"{self._arena(ubatch).name}: {caller} needs {need} bytes, but it was locked at {size}; "
            f"reserve them before the lock"
        )


def aligned(nbytes: int) -> int:
    """Rounded up to the alignment; never nothing, so that every view has an address of its own."""
    return max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
