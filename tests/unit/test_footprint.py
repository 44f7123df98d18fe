"""What a lane reports of its memory, on a device where every byte is known."""

from __future__ import annotations

from fake_device import Byte, FakeDevice

from workers.footprint import Footprint, KvNeed
from workers.workspace import Spec, Workspace

NEED = KvNeed(bytes_per_token=2, block=64, max_tokens=1024)


def test_each_part_is_counted_once():
    device = FakeDevice()
    device.allocate(256)  # of the process, before anything is loaded
    footprint = Footprint(device)
    unpacking = device.allocate(8192)
    device.allocate(4096)
    device.free(unpacking)
    footprint.loaded()
    workspace: Workspace = Workspace(device, "target")
    workspace.reserve(0, "attention setup", Spec((1024,), Byte()))
    kept = []

    def run() -> None:
        kept.append(device.allocate(16384))  # keys and values that are there for the run alone
        workspace.take(0, "pass", Spec((2048,), Byte()))
        device.free(device.allocate(512))

    profile = footprint.profile(run, NEED, lambda: workspace.nbytes, lambda: 768, lambda: 16384)
    assert (profile.process, profile.weights, profile.load_peak) == (256, 4096, 256 + 4096 + 8192)
    assert (profile.workspace, profile.activations, profile.graphs) == (2048, 512, 768)
    assert (profile.kv_bytes_per_token, profile.kv_block, profile.max_kv_tokens) == (2, 64, 1024)
    assert profile.free + profile.held == device.size
    assert profile.held == 256 + 4096 + 16384 + 2048
