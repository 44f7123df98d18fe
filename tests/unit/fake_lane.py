"""A lane on a fake device: as much of a model as has to do with storage, on the real workspace and graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fake_device import Byte

from workers.graphs import Graphs, Shape
from workers.lifecycle import Lifecycle
from workers.workspace import Spec, Workspace

if TYPE_CHECKING:
    from fake_device import FakeDevice, FakeView

    from ipc.messages import Phase

UBATCH = 0
BYTE = Byte()


class FakeLane:
    """Computes input + `constant`, by way of its scratch storage. `width`: bytes of scratch per row."""

    def __init__(self, device: FakeDevice, workspace: Workspace, constant: int, width: int) -> None:
        self.device = device
        self.workspace = workspace
        self.constant = constant
        self.width = width
        self.shapes = [Shape(batch, rows) for batch in (1, 2, 4) for rows in (1, 3)]
        self.graphs = Graphs(device, workspace, UBATCH)
        self.steps = Lifecycle(lambda phase, seconds, outcome: None, 0.0)
        self.kv: list = []
        self.results: dict[Shape, FakeView] = {}

    # ------------------------------------------------------------ the start

    def take(self, phase: Phase) -> None:
        with self.steps.step(phase):
            getattr(self, f"_{phase}", lambda: None)()

    def _load(self) -> None:
        self.input = self.workspace.keep(UBATCH, "load", "input", Spec((1,), BYTE))
        self.output = self.workspace.keep(UBATCH, "load", "output", Spec((1,), BYTE))
        (weights,) = self.workspace.take(UBATCH, "load", Spec((self.width,), BYTE))
        weights.fill(1)

    def _attention_setup(self) -> None:
        self.workspace.reserve(UBATCH, "attention", *self.specs(self.shapes[-1]))

    def _profile(self) -> None:
        self.graph_bytes = self.graphs.measure(self.shapes, self.run)

    def _allocate(self) -> None:
        for number in range(4):
            storage = self.device.allocate(512)
            storage.fill(100 + number)
            self.kv.append(storage)

    def _warm_up(self) -> None:
        for shape in self.shapes:
            self.run(shape)

    def _capture(self) -> None:
        self.graphs.capture(self.shapes, self.run)

    def _lock(self) -> None:
        self.workspace.lock()

    # ------------------------------------------------------------ work

    def specs(self, shape: Shape) -> tuple[Spec, Spec]:
        rows = shape.batch * shape.rows
        return Spec((rows, self.width), BYTE), Spec((rows,), BYTE)

    def run(self, shape: Shape) -> FakeView:
        """Leaves its result in the output, and in scratch, where it may be read until the next call."""
        hidden, result = self.workspace.take(UBATCH, "run", *self.specs(shape))
        hidden.copy(self.input)
        result.copy(hidden, self.constant)
        self.output.copy(result)
        self.results[shape] = result
        return result

    def answer(self, shape: Shape, value: int) -> int:
        """What the graph of a shape makes of a value."""
        self.input.fill(value)
        self.graphs.replay(shape)
        return self.output.value

    def preempt(self, number: int) -> None:
        """Give up a sequence's storage, and compute it again somewhere."""
        self.device.free(self.kv[number])
        self.kv[number] = self.device.allocate(512)
        self.kv[number].fill(100 + number)

    def kv_is_sound(self) -> bool:
        return all(
            storage.view(0, Spec((512,), BYTE)).value == 100 + number
            for number, storage in enumerate(self.kv)
        )

    def die(self) -> None:
        """All that the process held goes back to the device."""
        self.graphs.release()
        for storage in self.kv:
            self.device.free(storage)
        for arena in self.workspace._arenas.values():
            for _, storage in arena.kept.values():
                self.device.free(storage)
            if arena.storage is not None:
                self.device.free(arena.storage)
