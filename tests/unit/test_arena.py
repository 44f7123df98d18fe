"""Arenas by themselves: what is published is read, what cannot be is refused, nothing is reused too soon."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from ipc.arena import PROBE_BYTES, Arena, Importer
from ipc.descriptor import ALIGNMENT, MAX_DIMENSIONS, check, tensor_bytes
from ipc.errors import ArenaError, BadDescriptor, ProtocolError
from ipc.memfd import MappedMemfd, MemfdMemory
from ipc.messages import ArenaExport, Descriptor
from ipc.slots import SlotEvent, SlotState
from workers.tensors import DTYPES, tensor_over

NBYTES = 64 * ALIGNMENT
_S, _E = SlotState, SlotEvent


@pytest.fixture
def arena():
    made = Arena("a1", "e1", NBYTES, "memfd", slots=8)
    yield made
    gc.collect()
    assert made.close()


@pytest.fixture
def importer(arena):
    made = Importer()
    made.open(arena.export, os.dup(arena.fd))
    yield made
    made.close_all()
    gc.collect()
    assert made.tidy() == 0


def test_what_was_published_is_what_is_viewed(arena, importer):
    importer.prove("a1")
    slot = arena.reserve(2 * 3 * 4)
    tensor_over(arena.span(slot), "fp32", (2, 3)).copy_(torch.arange(6.0).view(2, 3))
    descriptor = arena.publish(slot, "fp32", (2, 3))
    seen = tensor_over(importer.view(descriptor), descriptor.dtype, descriptor.shape)
    assert torch.equal(seen, torch.arange(6.0).view(2, 3))
    del seen
    assert importer.ack(descriptor) == [descriptor.ref]
    assert importer.ack(descriptor) == []
    arena.release([descriptor.ref])
    assert arena.count(_S.FREE) == 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(arena, importer, dtype):
    bits = torch.randint(0, 100, (3, 8), dtype=torch.uint8)
    shape = (3, 8 // tensor_bytes(dtype, (1,)))
    descriptor = arena.put(bits.numpy().tobytes(), dtype, shape)
    seen = tensor_over(importer.view(descriptor), dtype, shape)
    assert (seen.dtype, tuple(seen.shape)) == (DTYPES[dtype], shape)
    assert torch.equal(seen.view(torch.uint8), bits)


def test_a_tensor_is_no_copy(arena, importer):
    descriptor = arena.put(bytes(8), "uint8", (8,))
    seen = tensor_over(importer.view(descriptor), "uint8", (8,))
    arena._memory.write(descriptor.offset, b"x" * 8)  # which an exporter never does
    assert bytes(seen.numpy()) == b"x" * 8


def test_there_is_no_room_beyond_slots_or_bytes(arena):
    whole = arena.reserve(NBYTES)
    assert arena.reserve(1) is None
    arena.abandon(whole)
    slots = [arena.reserve(1) for _ in range(8)]
    assert None not in slots
    assert arena.reserve(1) is None
    assert arena.free_bytes == NBYTES - 8 * ALIGNMENT  # and what was tried for nothing is free
    for slot in slots:
        arena.abandon(slot)
    assert (arena.free_slots, arena.free_bytes) == (8, NBYTES)


def test_a_tensor_larger_than_its_slot_is_refused(arena):
    slot = arena.reserve(8)
    with pytest.raises(BadDescriptor, match="in a slot of 8 bytes"):
        arena.publish(slot, "fp32", (3,))
    assert arena.publish(slot, "fp32", (1,)).nbytes == 4


def test_a_slot_is_not_reused_before_the_ack_however_late(arena):
    taken = [arena.put(bytes([i]) * 300, "uint8", (300,)) for i in range(8)]
    assert arena.put(b"x", "uint8", (1,)) is None
    arena.apply(taken[3].ref, _E.LEASED)
    arena.apply(taken[4].ref, _E.TIMED_OUT)
    arena.apply(taken[3].ref, _E.TIMED_OUT)
    assert arena.count(_S.QUARANTINED) == 2
    assert arena.put(b"x", "uint8", (1,)) is None
    arena.release([taken[3].ref])  # it had only been late
    again = arena.put(b"x", "uint8", (1,))
    assert (again.slot, again.generation) == (taken[3].slot, 2)
    arena.release([taken[3].ref])  # said twice: stale
    assert (arena.stale, arena.count(_S.FREE)) == (1, 0)
    assert arena.peer_died() == 8
    assert (arena.count(_S.FREE), arena.free_bytes) == (8, NBYTES)


def test_words_about_other_arenas_and_illegal_ones(arena):
    descriptor = arena.put(b"x", "uint8", (1,))
    arena.release([structs.replace(descriptor.ref, arena="a0")])
    arena.release([structs.replace(descriptor.ref, slot=99)])
    assert arena.stale == 2
    with pytest.raises(ProtocolError, match="acquired is not legal in state published"):
        arena.apply(descriptor.ref, _E.ACQUIRED)


def test_a_stale_descriptor_is_refused(arena, importer):
    first = arena.put(b"1", "uint8", (1,))
    importer.view(first)
    importer.ack(first)
    arena.release([first.ref])
    for _ in range(7):
        arena.reserve(1)
    second = arena.put(b"2", "uint8", (1,))
    assert second.slot == first.slot
    assert bytes(importer.view(second)) == b"2"
    with pytest.raises(BadDescriptor, match="slot 0: generation 1, now 2"):
        importer.view(first)


def test_an_arena_that_is_closed_here_is_out_of_reach(arena, importer):
    descriptor = arena.put(b"1", "uint8", (1,))
    importer.view(descriptor)
    importer.close("a1")
    assert importer.ack(descriptor) == []
    with pytest.raises(BadDescriptor, match="arena a1 is not open here"):
        importer.view(descriptor)
    importer.close("a1")


def test_a_mapping_stays_until_the_last_tensor_over_it_is_gone(arena, importer):
    descriptor = arena.put(b"12345678", "uint8", (8,))
    seen = tensor_over(importer.view(descriptor), "fp64", (1,)).view(torch.uint8)[2:4]
    importer.close("a1")
    assert importer.tidy() == 1
    assert bytes(seen.numpy()) == b"34"
    del seen
    gc.collect()
    assert importer.tidy() == 0


EXPORT = ArenaExport("a1", "e1", "memfd", NBYTES, 8, "cpu", b"", 1, 1)
FIELDS = {
    "arena": st.sampled_from(["a1", "a2", ""]),
    "epoch": st.sampled_from(["e1", "e2"]),
    "slot": st.integers(-2, 1 << 40),
    "generation": st.integers(-1, 3),
    "offset": st.integers(-NBYTES, 1 << 62),
    "nbytes": st.integers(-1, 1 << 62),
    "dtype": st.sampled_from([*DTYPES, "bool", ""]),
    "shape": st.lists(st.integers(-2, 1 << 20), max_size=MAX_DIMENSIONS + 2).map(tuple),
}


def truth(d: Descriptor) -> bool:
    """Spelt out once more, by other means: whether it lies in the arena's bytes and says how it is read."""
    sizes = {name: torch.empty(0, dtype=dtype).element_size() for name, dtype in DTYPES.items()}
    if (d.arena, d.epoch) != ("a1", "e1") or d.slot not in range(8) or d.generation < 1:
        return False
    if d.dtype not in sizes or len(d.shape) > MAX_DIMENSIONS or any(size < 0 for size in d.shape):
        return False
    nbytes = sizes[d.dtype]
    for size in d.shape:
        nbytes *= size
    return nbytes == d.nbytes > 0 and d.offset in range(0, NBYTES - d.nbytes + 1, ALIGNMENT)


@settings(max_examples=400, derandomize=True, deadline=None)
@given(st.data())
def test_a_malformed_descriptor_never_comes_to_memory(data):
    """Fields of a good one are replaced by others; only what is true all the same is viewed."""
    good = Descriptor("a1", "e1", 3, 1, ALIGNMENT, 24, "fp32", (2, 3))
    names = data.draw(st.sets(st.sampled_from(sorted(FIELDS)), min_size=1))
    fuzzed = structs.replace(good, **{name: data.draw(FIELDS[name], label=name) for name in sorted(names)})
    cut: list[tuple[int, int]] = []
    importer = Importer()
    importer._open["a1"] = (EXPORT, _Spy(cut))
    if truth(fuzzed):
        importer.view(fuzzed)
        assert cut == [(fuzzed.offset, fuzzed.nbytes)]
    else:
        with pytest.raises(BadDescriptor):
            importer.view(fuzzed)
        assert cut == []


class _Spy:
    def __init__(self, cut: list[tuple[int, int]]) -> None:
        self._cut = cut

    def span(self, offset, nbytes):
        self._cut.append((offset, nbytes))
        return memoryview(b"")


def test_the_check_lets_all_that_is_true_pass():
    check(Descriptor("a1", "e1", 0, 1, 0, NBYTES, "uint8", (NBYTES,)), EXPORT)
    check(Descriptor("a1", "e1", 7, 9, NBYTES - ALIGNMENT, 2, "bf16", ()), EXPORT, newest=9)


# ---------------------------------------------------------------- memfd


def test_the_memory_is_sealed_and_there():
    memory = MemfdMemory(1 << 16)
    seals = fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS)
    assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) == 7 & ~8
    assert os.fstat(memory.fd).st_blocks * 512 >= 1 << 16  # not a hole
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.fd, 1 << 16)  # nobody else writes
    reader = MappedMemfd(os.dup(memory.fd), 1 << 16)
    with pytest.raises(TypeError):
        reader.span(0, 4)[0] = 1
    assert reader.close()
    assert memory.close()


def test_memory_that_there_is_not():
    with pytest.raises(ArenaError, match=r"no memfd of 1152921504606846976 bytes: [0-9]+ are available"):
        MemfdMemory(1 << 60)


def test_files_that_could_be_cut_under_a_reader_are_refused(arena):
    loose = os.memfd_create("loose")
    os.ftruncate(loose, 4096)
    with pytest.raises(ArenaError, match="with seals 0x"):
        MappedMemfd(loose, 4096)
    with pytest.raises(ArenaError, match=f"{2 * NBYTES + PROBE_BYTES} were announced"):
        Importer().open(structs.replace(arena.export, nbytes=2 * NBYTES), os.dup(arena.fd))
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(loose)  # it was taken over


def test_another_pattern_is_noticed(arena):
    importer = Importer()
    importer.open(structs.replace(arena.export, epoch="e9"), os.dup(arena.fd))
    with pytest.raises(ArenaError, match="what its exporter wrote is not what is read here"):
        importer.prove("a1")
    importer.close_all()


def test_a_memfd_without_its_file_and_an_arena_twice(arena, importer):
    with pytest.raises(ArenaError, match="no descriptor came with it"):
        Importer().open(arena.export)
    with pytest.raises(ProtocolError, match="arena a1 is open already"):
        importer.open(arena.export)
