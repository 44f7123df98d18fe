"""Arenas between real processes, over memfd and over a CUDA runtime that is none."""

from __future__ import annotations

import os
import random
import select
import signal

import pytest
from arena_peer import SECONDS, Peer, Said, publish
from fake_cuda import FakeCuda
from msgspec import structs

from ipc import cuda
from ipc.arena import Arena, Importer
from ipc.errors import ArenaError, CudaIpcUnavailable
from ipc.slots import SlotEvent, SlotState

TRANSPORTS = ("memfd", "cuda_ipc")
HAND_OFFS = 36_000
"""As many as an hour has at ten rounds a second."""


@pytest.fixture(autouse=True)
def fake():
    runtime = FakeCuda()
    cuda.install(runtime)
    yield runtime
    cuda.install(None)


@pytest.fixture
def start():
    peers = []

    def start(transport: str, patience: int) -> Peer:
        peers.append(Peer(transport, patience))
        return peers[-1]

    yield start
    for peer in peers:
        peer.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_ways_are_proved_end_to_end(start, transport):
    arena = Arena("there", "exporter", 1 << 16, transport)
    peer = start(transport, 0)
    said = peer.import_(arena)
    assert said.proved
    importer = peer.open_its_arena(said)
    importer.close("back")
    assert importer.tidy() == 0
    assert arena.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_late_acks_and_a_flood_never_show_a_reader_another_generation(start, transport):
    """The producer writes as soon as there is a free slot, of which there are few."""
    rng = random.Random(7)
    arena = Arena("flood", "exporter", 16 << 10, transport, slots=12)
    peer = start(transport, patience=5)
    peer.import_(arena)
    handed = acked = full = 0
    while acked < HAND_OFFS:
        batch = []
        while handed < HAND_OFFS and len(batch) < 8:
            descriptor = publish(arena, rng.randrange(1, 4096))
            if descriptor is None:
                full += 1
                break
            arena.apply(descriptor.ref, SlotEvent.LEASED)
            batch.append(descriptor)
            handed += 1
        peer.show(batch)  # an empty one asks for all that is held
        said = peer.hear()
        assert said.wrong == 0
        arena.release(said.acks)
        acked += len(said.acks)
    assert full > HAND_OFFS // 100  # it was a flood
    assert (arena.stale, arena.count(SlotState.FREE)) == (0, 12)
    assert arena.close()


def test_the_flood_would_show_slots_that_are_reused_too_soon(start):
    """The test above can fail: here nothing waits for acks."""
    arena = Arena("flood", "exporter", 16 << 10, "memfd", slots=12)
    peer = start("memfd", patience=5)
    peer.import_(arena)
    wrong = 0
    for _ in range(100):
        descriptor = publish(arena, 1000)
        peer.show([descriptor])
        arena.release([descriptor.ref])
        publish(arena, 1000)
        wrong += peer.hear().wrong
        arena.peer_died()
    assert wrong > 0
    assert arena.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_killed_importer_held_is_free_once_its_death_is_certain(start, transport):
    arena = Arena("held", "exporter", 1 << 20, transport, slots=128)
    peer = start(transport, patience=1000)
    peer.import_(arena)
    leases = [publish(arena, 5000) for _ in range(100)]
    for descriptor in leases:
        arena.apply(descriptor.ref, SlotEvent.LEASED)
    peer.show(leases)
    assert peer.hear() == Said(True, [], 0)  # it reads them all
    pidfd = os.pidfd_open(peer.process.pid)
    for descriptor in leases[:10]:
        arena.apply(descriptor.ref, SlotEvent.TIMED_OUT)
    assert (arena.count(SlotState.LEASED), arena.count(SlotState.QUARANTINED)) == (90, 10)
    peer.process.send_signal(signal.SIGKILL)
    assert arena.count(SlotState.FREE) == 28  # a signal that was sent is no death
    assert select.select([pidfd], [], [], SECONDS)[0]
    os.close(pidfd)
    assert arena.peer_died() == 100
    assert (arena.count(SlotState.FREE), arena.free_bytes) == (128, 1 << 20)
    assert arena.close()


def test_memory_of_a_killed_exporter_stays_until_the_importer_lets_go(start, fake):
    """As with a driver: a mapping pins what it maps, and goes at once when it is closed."""
    arena = Arena("there", "exporter", 1 << 16, "cuda_ipc")
    peer = start("cuda_ipc", 0)
    importer = peer.open_its_arena(said := peer.import_(arena))
    peer.process.kill()
    peer.process.wait()
    importer.prove("back")
    importer.close("back")
    assert fake.mappings == 0
    with pytest.raises(CudaIpcUnavailable, match="as if its exporter were gone") as refusal:
        importer.open(said.export)
    assert refusal.value.obstacle == "driver"
    assert arena.close()
    assert fake.allocations == 0


@pytest.mark.parametrize(
    ("changes", "obstacle", "says"),
    [
        ({"fails": {"export": cuda.INVALID_VALUE}}, "not_exportable", "expandable segments"),
        ({"fails": {"export": cuda.NOT_SUPPORTED}}, "not_exportable", "cudaMallocAsync"),
        ({"fails": {"export": 999}}, "driver", "exports nothing"),
        ({"fails": {"device_ids": 35}}, "driver", "the driver says"),
        ({"name": "NVIDIA H200 MIG 1g.18gb"}, "mig", "is a MIG slice"),
        ({"ids": ("GPU-other",)}, "device_not_visible", "let both see both"),
    ],
)
def test_who_cannot_export_is_told_why(changes, obstacle, says):
    runtime = FakeCuda(**changes)
    cuda.install(runtime)
    with pytest.raises(CudaIpcUnavailable, match=says) as refusal:
        Arena("there", "exporter", 1 << 16, "cuda_ipc")
    assert refusal.value.obstacle == obstacle
    assert runtime.allocations == 0


def test_there_is_not_so_much_device_memory():
    cuda.install(FakeCuda(capacity=1 << 16))
    with pytest.raises(ArenaError, match="no 69632 bytes on GPU cpu"):
        Arena("there", "exporter", 1 << 16, "cuda_ipc")


def test_wsl_is_told_by_its_kernel(monkeypatch):
    monkeypatch.setattr(cuda, "_kernel", lambda: "Linux version 5.15.90.1-microsoft-standard-WSL2")
    with pytest.raises(CudaIpcUnavailable, match="WSL2 has no CUDA IPC") as refusal:
        Arena("there", "exporter", 1 << 16, "cuda_ipc")
    assert refusal.value.obstacle == "wsl2"


@pytest.mark.parametrize(
    ("changes", "fails", "obstacle", "says"),
    [
        ({"pid": os.getpid()}, {}, "same_process", "share the PID namespace"),
        ({"pid": 1, "pid_namespace": 1}, {}, "pid_namespace", "in different PID namespaces"),
        ({"pid": 1, "pid_namespace": 0}, {"open": 201}, "same_process", "do both lanes have the same pid"),
        ({"pid": 1}, {"open": 217}, "driver", "have no way to each other"),
        ({"pid": 1}, {"open": 999}, "driver", "does not say why"),
        ({"pid": 1, "device_id": "GPU-0"}, {}, "device_not_visible", "GPU GPU-0 is not visible"),
    ],
)
def test_who_cannot_import_is_told_why(changes, fails, obstacle, says):
    arena = Arena("there", "exporter", 1 << 16, "cuda_ipc")
    runtime = FakeCuda(fails=fails)
    cuda.install(runtime)
    with pytest.raises(CudaIpcUnavailable, match=says) as refusal:
        Importer().open(structs.replace(arena.export, **changes))
    assert refusal.value.obstacle == obstacle
    assert runtime.mappings == 0
    assert arena.close()


def test_a_lane_on_a_cpu_never_asks_the_driver():
    cuda.install(None)
    with pytest.raises(CudaIpcUnavailable, match="the lane runs on a CPU") as refusal:
        cuda.check_possible("cpu")
    assert refusal.value.obstacle == "no_device"


def test_the_real_runtime_where_there_is_no_driver():
    """Whether its package is installed or not, what is said is a reason."""
    cuda.install(None)
    with pytest.raises(CudaIpcUnavailable) as refusal:
        cuda.check_possible("GPU-0")
    assert refusal.value.obstacle in ("no_bindings", "driver", "device_not_visible")
