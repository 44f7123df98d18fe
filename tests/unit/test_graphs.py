"""Captured graphs: order, pools, which one serves a batch, and that none runs over storage that moved."""

from __future__ import annotations

from itertools import pairwise

import pytest
from fake_device import FakeDevice
from fake_lane import BYTE, UBATCH
from hypothesis import given
from hypothesis import strategies as st

from workers.graphs import Graphs, MovedStorage, Shape, batch_buckets
from workers.workspace import Spec, Workspace

SHAPES = [Shape(1, 1), Shape(4, 6), Shape(4, 1), Shape(2, 6)]


class Runner:
    """A device with a workspace and graphs, and what was run and captured, in order."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.workspace: Workspace = Workspace(self.device, "target")
        self.graphs = Graphs(self.device, self.workspace, UBATCH)
        self.runs: list[tuple[str, Shape]] = []

    def run(self, shape: Shape) -> None:
        self.runs.append(("run" if self.device.recording is None else "capture", shape))
        (rows,) = self.workspace.take(UBATCH, "run", Spec((shape.batch * shape.rows, 100), BYTE))
        rows.fill(shape.batch)


def test_every_shape_runs_before_any_is_captured_and_the_largest_comes_first():
    runner = Runner()
    runner.graphs.capture(SHAPES, runner.run)
    order = [Shape(4, 6), Shape(2, 6), Shape(4, 1), Shape(1, 1)]
    assert runner.runs == [("run", shape) for shape in order] + [("capture", shape) for shape in order]
    assert runner.graphs.shapes == order


def test_smaller_captures_find_their_memory_in_the_pool():
    runner = Runner()
    runner.graphs.capture([Shape(4, 6)], runner.run)
    held = runner.device.memory().held
    runner.graphs.release()
    runner.graphs.capture(SHAPES, runner.run)
    assert runner.device.memory().held == held


def test_graphs_for_measuring_are_gone_with_their_pool_before_the_real_ones():
    runner = Runner()
    runner.workspace.reserve(UBATCH, "test", Spec((24, 100), BYTE))
    held = runner.device.memory().held
    taken = runner.graphs.measure(SHAPES, runner.run)
    assert taken == 2560  # one buffer of the largest shape, in whole pieces of 256 bytes
    assert runner.device.memory().held == held
    assert runner.graphs.shapes == []
    runner.graphs.capture(SHAPES, runner.run)
    assert runner.device.memory().held == held + taken


def test_graphs_are_not_captured_over_others():
    runner = Runner()
    runner.graphs.capture([Shape(1, 1)], runner.run)
    with pytest.raises(ValueError, match="release them before others are captured"):
        runner.graphs.capture([Shape(1, 1)], runner.run)


def test_a_graph_runs_only_over_the_storage_that_it_was_captured_over():
    runner = Runner()
    runner.graphs.capture(SHAPES, runner.run)
    runner.graphs.replay(Shape(2, 6))
    (rows,) = runner.workspace.take(UBATCH, "test", Spec((12, 100), BYTE))
    assert rows.value == 2
    runner.workspace.take(UBATCH, "test", Spec((10_000,), BYTE))
    with pytest.raises(MovedStorage, match=r"graph of Shape\(batch=2, rows=6\) was captured over storage 1"):
        runner.graphs.replay(Shape(2, 6))


def test_a_capture_that_moves_the_workspace_is_an_error():
    runner = Runner()

    def careless(shape: Shape) -> None:
        """Needs more when it is captured than when it ran before."""
        more = 1 + 10 * (runner.device.recording is not None)
        runner.workspace.take(UBATCH, "run", Spec((shape.batch * shape.rows * more, 100), BYTE))

    with pytest.raises(MovedStorage):
        runner.graphs.capture(SHAPES, careless)


@given(batch=st.integers(1, 6), rows=st.integers(1, 7))
def test_the_smallest_graph_that_holds_a_batch_serves_it(batch, rows):
    runner = Runner()
    runner.graphs.capture(SHAPES, runner.run)
    fitting = [shape for shape in SHAPES if shape.batch >= batch and shape.rows >= rows]
    found = runner.graphs.fit(batch, rows)
    assert (found is None) == (not fitting)
    if found:
        assert found in fitting
        assert found.batch * found.rows == min(shape.batch * shape.rows for shape in fitting)


@given(st.integers(1, 1024))
def test_batch_buckets_reach_from_one_to_the_largest(largest):
    buckets = batch_buckets(largest)
    assert buckets == sorted(set(buckets))
    assert (buckets[0], buckets[-1]) == (1, largest)
    assert all(after <= 2 * before or after - before <= 64 for before, after in pairwise(buckets))
