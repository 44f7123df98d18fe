"""Captured graphs of one lane: of which shapes, captured in what order, and when one may run.

A graph bakes the addresses of what it reads and writes. So each knows the storage that it was captured over,
and is never replayed over another. Knows no model: what is captured is a function of the shape.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from workers.device import Device, Graph
    from workers.workspace import Workspace


class Shape(NamedTuple):
    """So many sequences, with so many rows each."""

    batch: int
    rows: int


class MovedStorage(RuntimeError):
    """A graph's storage is not where it was when the graph was captured."""


class _Captured(NamedTuple):
    graph: Graph
    address: int
    generation: int


class Graphs:
    """The graphs of one ubatch of one lane, in a pool of their own."""

    def __init__(self, device: Device[Any], workspace: Workspace[Any], ubatch: int) -> None:
        self._device = device
        self._workspace = workspace
        self._ubatch = ubatch
        self._captured: dict[Shape, _Captured] = {}

    @property
    def shapes(self) -> list[Shape]:
        """In the order of their capture."""
        return list(self._captured)

    def measure(self, shapes: Sequence[Shape], run: Callable[[Shape], object]) -> int:
        """Bytes that graphs of these shapes take: captured into a pool that is thrown away with them."""
        before = self._device.memory().held
        self.capture(shapes, run)
        self._device.synchronise()
        taken = self._device.memory().held - before
        self.release()
        return max(0, taken)

    def capture(self, shapes: Sequence[Shape], run: Callable[[Shape], object]) -> None:
        """Each shape runs once, so that nothing is made lazily during the capture, then is captured.

        The largest first: smaller ones then find their memory in the pool and never replace a graph's. Raises
        MovedStorage if a capture moved the workspace, which makes those before it worthless; ValueError if
        there are graphs already, which must be released first.
        """
        if self._captured:
            raise ValueError("there are graphs already; release them before others are captured")
        pool = self._device.new_pool()
        largest_first = sorted(shapes, key=lambda shape: (shape.batch * shape.rows, shape), reverse=True)
        for shape in largest_first:
            run(shape)
        where = self._workspace.address(self._ubatch), self._workspace.generation(self._ubatch)
        for shape in largest_first:
            graph = self._device.capture(partial(run, shape), pool)
            self._captured[shape] = _Captured(graph, *where)
        for shape in largest_first:
            self._check(shape)

    def fit(self, batch: int, rows: int) -> Shape | None:
        """The smallest captured shape that holds a batch, None if none does."""
        fitting = [shape for shape in self._captured if shape.batch >= batch and shape.rows >= rows]
        return min(fitting, key=lambda shape: (shape.batch * shape.rows, shape), default=None)

    def replay(self, shape: Shape) -> None:
        """Raises MovedStorage rather than write where the workspace is no more."""
        self._check(shape)
        self._captured[shape].graph.replay()

    def release(self) -> None:
        """Destroy all graphs and their pool."""
        for captured in self._captured.values():
            captured.graph.release()
        self._captured.clear()

    def _check(self, shape: Shape) -> None:
        captured, workspace, ubatch = self._captured[shape], self._workspace, self._ubatch
        now = workspace.address(ubatch), workspace.generation(ubatch)
        if now != (captured.address, captured.generation):
            raise MovedStorage(
                f"the graph of {shape} was captured over storage {captured.generation} at "
                f"{captured.address:#x}, now it is {now[1]} at {now[0]:#x}"
            )


def batch_buckets(largest: int) -> list[int]:
    """1, 2, 4, then multiples of 8 up to 256, then of 64: batches are padded up to one of these."""
    sizes = {1, 2, 4, *range(8, min(largest, 256), 8), *range(256, largest, 64), largest}
    return sorted(size for size in sizes if size <= largest)
