"""Captured decoding in the native engine, on a CPU that plays graphs back by running their bodies again.

So all but the GPU's own part is what a GPU runs: padding, inputs that stay where they are, order and lock.
"""

from __future__ import annotations

import msgspec
import pytest
import torch
from small_models import lane, save
from test_native import token_ids

from workers.device import Cpu
from workers.engines import paged
from workers.engines.engine import Window
from workers.engines.native import NativeEngine
from workers.graphs import MovedStorage, Shape
from workers.lifecycle import made_ready
from workers.workspace import POISON_VARIABLE, Spec, WorkspaceLocked


class Playback:
    def __init__(self, body) -> None:
        self.body = body
        self.released = False
        self.replays = 0

    def replay(self) -> None:
        assert not self.released
        self.replays += 1
        self.body()

    def release(self) -> None:
        self.released = True


class PlaybackCpu(Cpu):
    captures = True

    def __init__(self) -> None:
        self.pools: list[list[Playback]] = []

    def new_pool(self) -> list[Playback]:
        self.pools.append([])
        return self.pools[-1]

    def capture(self, body, pool) -> Playback:
        pool.append(Playback(body))
        return pool[-1]


def spec(directory, batch: int = 4, k: int = 3):
    made = lane(directory, slots=batch)
    return msgspec.structs.replace(made, num_speculative_tokens=k, max_model_len=256)


@pytest.fixture
def engines(request, tmp_path, monkeypatch):
    """The same model with graphs and without."""
    monkeypatch.setenv(POISON_VARIABLE, "1")
    directory = save(tmp_path, getattr(request, "param", "llama"))
    plain = made_ready(NativeEngine(spec(directory)))
    device = PlaybackCpu()
    monkeypatch.setattr(paged, "open_device", lambda name: device)
    return made_ready(NativeEngine(spec(directory))), plain, device


def _replays(device):
    return sum(graph.replays for pool in device.pools for graph in pool)


@pytest.mark.parametrize("engines", ["llama", "qwen3", "mistral, sliding window"], indirect=True)
def test_windows_of_all_widths_and_batches_give_the_logits_of_plain_passes(engines):
    graphs, plain, device = engines
    ids = token_ids(200)
    rehearsed = _replays(device)
    assert rehearsed == 12  # plain and widest steps, of all sequences and of one, three times each
    length = dict.fromkeys(range(4), 0)
    for both in (graphs, plain):
        for seq in length:
            both.open(seq)
    steps = [
        [(0, 70, 1), (1, 5, 1), (2, 130, 1)],  # prefills, too long for a graph
        [(0, 1, 1), (1, 4, 4), (2, 2, 2)],
        [(0, 1, 1)],
        [(0, 4, 4)],
        [(3, 1, 1), (0, 1, 0), (1, 3, 1), (2, 4, 2)],
        [(2, 1, 1), (1, 1, 1)],
    ]
    for step in steps:
        ends = {seq: length[seq] + count for seq, count, _ in step}
        windows = [Window(seq, length[seq], ids[length[seq] : ends[seq]], rows) for seq, _, rows in step]
        ours, theirs = graphs.forward(windows), plain.forward(windows)
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() < 1e-4
        length |= ends
    rolled_back = [Window(0, 40, ids[100:103], 3)]
    assert (graphs.forward(rolled_back) - plain.forward(rolled_back)).abs().max() < 1e-4
    assert _replays(device) - rehearsed == len(steps)  # all but the prefills, and the one that rolled back


def test_graphs_for_measuring_are_released_and_the_real_ones_stay(engines):
    graphs, _, device = engines
    measured, real = device.pools
    assert all(graph.released for graph in measured)
    assert not any(graph.released for graph in real)
    assert graphs._decode.graphs.shapes[0] == Shape(4, 4)
    assert set(graphs._decode.graphs.shapes) == {Shape(b, r) for b in (1, 2, 4) for r in (1, 4)}


def test_a_locked_lane_runs_every_shape_that_it_may_be_asked_for(engines):
    graphs, _, _ = engines
    ids = token_ids(256)
    for seq in range(4):
        graphs.open(seq)
        graphs.forward([Window(seq, 0, ids[:250], 1)])
    for batch in (1, 3, 4):
        for rows in (1, 2, 4):
            graphs.forward([Window(seq, 250, ids[250 : 250 + rows], rows) for seq in range(batch)])
    with pytest.raises(WorkspaceLocked, match="workspace of the target, ubatch 0: a guest needs"):
        graphs.workspace.take(0, "a guest", Spec((1 << 30,), torch.uint8))


def test_a_graph_over_storage_that_moved_is_not_replayed(engines):
    graphs, _, _ = engines
    graphs.open(0)
    graphs.workspace._locked = False  # as between capture and lock
    graphs.workspace.take(0, "a guest", Spec((1 << 26,), torch.uint8))
    with pytest.raises(MovedStorage):
        graphs.forward([Window(0, 0, [1], 1)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_on_a_gpu_captured_decoding_gives_the_logits_of_plain_passes(family, tmp_path):
    made = msgspec.structs.replace(spec(save(tmp_path, family)), device="cuda:0")
    graphs, plain = made_ready(NativeEngine(made)), NativeEngine(made)
    plain.set_up_attention()
    plain._decode = None
    plain.allocate(4 * 256)
    ids = token_ids(200)
    for both in (graphs, plain):
        for seq in range(3):
            both.open(seq)
            both.forward([Window(seq, 0, ids[: 60 + seq], 0)])
    for batch, count in ((1, 1), (3, 4), (2, 2)):
        windows = [Window(seq, 60, ids[60 : 60 + count], count) for seq in range(batch)]
        assert (graphs.forward(windows) - plain.forward(windows)).abs().max() < 1e-3


def test_on_a_cpu_nothing_is_captured(tmp_path):
    engine = NativeEngine(spec(save(tmp_path, "llama")))
    assert made_ready(engine).capture() == "none"
