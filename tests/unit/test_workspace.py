"""The workspace: views of one call live together, ubatches never meet, and nothing moves after the lock."""

from __future__ import annotations

import threading

import pytest
import torch
from fake_device import FakeDevice
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.device import Cpu
from workers.workspace import ALIGNMENT, POISON_VARIABLE, Spec, StaleView, Workspace, WorkspaceLocked, aligned

DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64])
SPECS = st.lists(
    st.builds(Spec, st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), DTYPES), max_size=6
)


def workspace(**options) -> Workspace:
    return Workspace(Cpu(), "target", **options)


def floats(count: int) -> Spec:
    return Spec((count,), torch.float32)


@settings(derandomize=True, deadline=None)
@given(calls=st.lists(st.tuples(st.integers(0, 2), SPECS), max_size=8))
def test_views_of_one_call_are_aligned_and_apart_and_begin_where_the_last_ones_did(calls):
    mine = workspace()
    for ubatch, specs in calls:
        taken = mine.take(ubatch, "test", *specs)
        begin = mine.address(ubatch)
        end = begin
        for spec, view in zip(specs, taken, strict=True):
            assert (tuple(view.shape), view.dtype) == spec
            if spec.nbytes:
                assert view.data_ptr() == end
                assert view.data_ptr() % ALIGNMENT == 0
            end += aligned(spec.nbytes)
        assert end - begin <= mine._arenas[ubatch].size


def test_growth_of_one_ubatch_touches_no_other():
    mine = workspace()
    mine.take(0, "test", floats(10))
    (other,) = mine.take(1, "test", floats(10))
    other.fill_(7)
    before = mine.address(1), mine.generation(1)
    mine.take(0, "test", floats(100_000))
    assert (mine.generation(0), (mine.address(1), mine.generation(1))) == (2, before)
    assert torch.equal(other, torch.full((10,), 7.0))


def test_the_next_call_gets_the_same_storage_and_makes_the_last_ones_views_stale():
    mine = workspace()
    first = mine.take(0, "test", floats(10))
    address = first[0].data_ptr()
    second = mine.take(0, "test", floats(5))
    assert second[0].data_ptr() == address
    with pytest.raises(StaleView, match="workspace of the target, ubatch 0: views of call 2 used in call 3"):
        first.views  # noqa: B018


def test_growth_by_reserving_makes_views_stale_too():
    mine = workspace()
    views = mine.take(0, "test", floats(10))
    mine.reserve(0, "test", floats(10))
    assert len(views.views) == 1
    mine.reserve(0, "test", floats(1000))
    with pytest.raises(StaleView):
        list(views)


def test_what_was_reserved_is_taken_without_growth():
    mine = workspace()
    mine.reserve(0, "test", floats(100), floats(100))
    generation = mine.generation(0)
    mine.take(0, "test", floats(100), floats(100))
    assert mine.generation(0) == generation


def test_after_the_lock_growth_is_an_error_that_names_caller_need_and_size():
    mine = workspace()
    mine.reserve(0, "attention", floats(64))
    mine.lock()
    mine.take(0, "attention", floats(64))
    with pytest.raises(WorkspaceLocked) as refused:
        mine.take(0, "a late guest", floats(65))
    assert str(refused.value) == (
        "workspace of the target, ubatch 0: a late guest needs 512 bytes, but it was locked at 256; "
        "reserve them before the lock"
    )
    with pytest.raises(WorkspaceLocked, match="ubatch 1"):
        mine.take(1, "another ubatch", floats(1))
    with pytest.raises(WorkspaceLocked, match="attention, for counters, needs 4 bytes"):
        mine.keep(0, "attention", "counters", floats(1))
    assert (mine.nbytes, mine.locked) == (256, True)


def test_what_is_kept_outlives_calls_and_growth_and_is_the_same_for_all_who_name_it():
    mine = workspace()
    kept = mine.keep(0, "test", "counters", floats(4))
    kept.fill_(3)
    mine.take(0, "test", floats(10))
    mine.take(0, "test", floats(10_000))
    mine.lock()
    again = mine.keep(0, "another", "counters", floats(4))
    assert again.data_ptr() == kept.data_ptr()
    assert torch.equal(again, torch.full((4,), 3.0))
    with pytest.raises(ValueError, match="counters is kept as"):
        mine.keep(0, "test", "counters", floats(5))


def test_ubatches_have_counters_of_their_own():
    mine = workspace()
    zero, one = (mine.keep(ubatch, "test", "counters", floats(4)) for ubatch in (0, 1))
    assert zero.data_ptr() != one.data_ptr()


def test_poison_makes_stale_values_no_numbers():
    mine = workspace(poison=True)
    (before,) = mine.take(0, "test", floats(8))
    assert before.isnan().all()
    before.fill_(1)
    (index,) = mine.take(0, "test", Spec((8,), torch.int64))
    assert (index == -1).all()
    assert before.isnan().all()
    mine.take(0, "test", floats(1000))
    assert before.isnan().all()  # what it was is poisoned before it goes


def test_poison_is_asked_of_the_environment(monkeypatch):
    monkeypatch.setenv(POISON_VARIABLE, "1")
    (view,) = workspace().take(0, "test", floats(8))
    assert view.isnan().all()
    monkeypatch.setenv(POISON_VARIABLE, "0")
    mine = workspace()
    (view,) = mine.take(0, "test", floats(8))
    view.fill_(1)
    assert torch.equal(mine.take(0, "test", floats(8))[0], torch.ones(8))


def test_threads_with_a_ubatch_each_share_nothing():
    mine = workspace()
    sums: dict[int, bool] = {}

    def run(ubatch: int) -> None:
        for size in range(1, 300):
            (view,) = mine.take(ubatch, "thread", floats(size))
            view.fill_(ubatch)
            sums[ubatch] = sums.get(ubatch, True) and bool((view == ubatch).all())

    threads = [threading.Thread(target=run, args=(ubatch,)) for ubatch in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == dict.fromkeys(range(4), True)


def test_growth_gives_the_old_storage_back_before_it_asks_for_new():
    device = FakeDevice(size=4096)
    mine: Workspace = Workspace(device, "target")
    spec = Spec((2048,), torch.uint8)
    mine.take(0, "test", spec)
    mine.take(0, "test", Spec((4096,), torch.uint8))
    assert device.memory().held == 4096
