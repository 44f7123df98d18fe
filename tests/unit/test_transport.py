"""Which way tensors take: tried in order, proved both ways, and given up for the next one by name."""

from __future__ import annotations

import logging
import os

import pytest
from letters import request
from msgspec import structs

from executor.errors import InvalidConfig
from executor.hidden_rows import KeptRows, arena_bytes
from executor.lane import Lane
from executor.transport import Transport, TransportPolicy
from ipc.link import LinkState
from ipc.messages import (
    ArenaExport,
    Descriptor,
    Export,
    Exported,
    HeadSpec,
    HiddenRows,
    Import,
    Imported,
    LaneSpec,
    Loaded,
    SlotRef,
    Unmap,
)

HEAD = HeadSpec("head", (1,), row_bytes=64, window=8)
ON_A_CPU = "the lane runs on a CPU"


class FakeLifeline:
    """Files by name; every one is the null device."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.taken: list[int] = []
        self.works = True

    def take(self, name: str) -> int | None:
        if not self.works:
            return None
        self.taken.append(os.open(os.devnull, os.O_RDONLY))
        return self.taken[-1]

    def give(self, name: str, fd: int) -> bool:
        os.fstat(fd)
        self.sent.append(name)
        return self.works


class FakeProcess:
    def __init__(self) -> None:
        self.lifeline: FakeLifeline | None = FakeLifeline()


class Bench:
    """A transport with lanes that do as they are told, if they are asked to."""

    def __init__(self, policy: TransportPolicy = TransportPolicy(), obstacle: str = "") -> None:  # noqa: B008
        self.posted: list[tuple[Lane, object]] = []
        self.transport = Transport(policy, lambda lane, order: self.posted.append((lane, order)), 10.0)
        self.obstacle = obstacle
        self.lanes: list[Lane] = []

    def lane(self, name: str, head: HeadSpec | None = None) -> Lane:
        lane = Lane(LaneSpec(name, "native", "", "fp32", "cpu", 1, 4, 64, 3, head=head))
        lane.process = FakeProcess()  # type: ignore[assignment]
        lane.link.state = LinkState.LOADED
        self.lanes.append(lane)
        return lane

    def load(self, lane: Lane) -> Lane:
        self.transport.loaded(lane, Loaded(lane.epoch, "cpu", self.obstacle))
        return lane

    def both(self) -> tuple[Lane, Lane]:
        return self.load(self.lane("target")), self.load(self.lane("speculator", HEAD))

    def orders(self, kind: type) -> list:
        """Those that came since the last time, and their lanes."""
        found = [(lane, order) for lane, order in self.posted if isinstance(order, kind)]
        self.posted = [pair for pair in self.posted if not isinstance(pair[1], kind)]
        return found

    def export_all(self, *, but: str = "", reason: str = "no") -> list[str]:
        """Answer what was asked to be exported; the transports that were asked for."""
        asked = self.orders(Export)
        for lane, order in asked:
            export = ArenaExport(order.arena, lane.epoch, order.transport, order.nbytes, 8, "cpu", b"", 1, 1)
            fact = (
                Exported(lane.epoch, order.arena, None, reason)
                if lane.name == but
                else Exported(lane.epoch, order.arena, export)
            )
            self.transport.exported(lane, fact)
        return [order.transport for _, order in asked]

    def import_all(self, *, but: str = "") -> list[str]:
        asked = self.orders(Import)
        for lane, order in asked:
            reason = "another pattern" if lane.name == but else ""
            self.transport.imported(lane, Imported(lane.epoch, order.export.arena, reason))
        return [lane.name for lane, _ in asked]

    def end(self, lane: Lane) -> None:
        self.lanes.remove(lane)
        self.transport.reconcile(self.lanes)


@pytest.fixture
def bench():
    benches = []

    def make(*args, **options) -> Bench:
        benches.append(Bench(*args, **options))
        return benches[-1]

    yield make
    for each in benches:
        each.transport.close()


def test_the_best_way_is_proved_both_ways_and_chosen(bench):
    here = bench()
    target, speculator = here.both()
    assert not here.transport.settled([target.spec, speculator.spec])
    assert here.transport.settled([speculator.spec])  # at a server, whose targets are elsewhere
    assert here.export_all() == ["cuda_ipc", "cuda_ipc"]
    assert here.transport.chosen is None
    assert here.import_all() == ["speculator", "target"]
    assert here.transport.info == ("cuda_ipc", "")
    assert here.transport.settled([target.spec, speculator.spec])
    arena = here.transport.arena_for(target, speculator)
    assert arena.startswith(target.epoch)
    assert here.transport.reaches(speculator, arena)


def test_on_cpus_it_is_memfd_and_the_files_are_passed_on(bench):
    here = bench(obstacle=ON_A_CPU)
    target, speculator = here.both()
    assert here.export_all() == ["memfd", "memfd"]
    here.import_all()
    assert here.transport.info == ("memfd", f"no cuda_ipc: the target: {ON_A_CPU}")
    assert speculator.process.lifeline.sent == [here.transport.arena_for(target, speculator)]
    assert len(target.process.lifeline.sent) == 1


def test_there_is_nothing_to_do_for_a_speculator_that_reads_no_rows(bench):
    here = bench()
    here.load(here.lane("target"))
    lookups = here.load(here.lane("speculator"))
    assert here.posted == []
    assert here.transport.settled([here.lanes[0].spec, lookups.spec])
    assert here.transport.info == ("none", "")
    assert here.transport.arena_for(here.lanes[0], lookups) == ""


@pytest.mark.parametrize("fault", ["export", "import", "file"])
@pytest.mark.parametrize("who", ["target", "speculator"])
def test_what_fails_falls_back_step_by_step(bench, fault, who):
    here = bench()
    target, speculator = here.both()
    if fault == "export":
        here.export_all(but=who, reason="it is a MIG slice")
    else:
        here.export_all()
        here.import_all(but=who)
    assert "cuda_ipc" in here.transport.info.reason
    dropped = {name for _, order in here.orders(Unmap) for name in order.arenas}
    assert len(dropped) == (1 if fault == "export" else 2)  # one was never made
    here.orders(Import)
    if fault == "file":
        target.process.lifeline.works = False
        assert here.export_all() == ["memfd", "memfd"]
        assert here.transport.info.name == "inline"
        assert here.transport.arena_for(target, speculator) == ""
    else:
        assert here.export_all() == ["memfd", "memfd"]
        here.import_all()
        assert here.transport.info.name == "memfd"
        assert here.transport.arena_for(target, speculator) not in dropped


def test_the_file_of_a_try_that_was_given_up_pins_no_memory(bench):
    here = bench(obstacle=ON_A_CPU)
    target, speculator = here.both()
    orders = dict(here.orders(Export))
    here.transport.exported(target, Exported(target.epoch, orders[target].arena, None, "no memory"))
    assert here.transport.info.name == "inline"
    order = orders[speculator]
    late = ArenaExport(order.arena, speculator.epoch, "memfd", order.nbytes, 8, "cpu", b"", 1, 1)
    here.transport.exported(speculator, Exported(speculator.epoch, order.arena, late))
    (fd,) = speculator.process.lifeline.taken
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_way_that_was_asked_for_and_is_none_is_said_aloud(bench, caplog):
    here = bench(TransportPolicy("memfd"))
    target, speculator = here.lane("target"), here.lane("speculator", HEAD)
    speculator.process.lifeline = None
    with caplog.at_level(logging.WARNING, "speclane"):
        here.load(target)
        here.load(speculator)
    (said,) = caplog.messages
    assert said.startswith("event=transport_fallback transport=memfd next=inline")


def test_what_is_required_is_refused_instead(bench):
    here = bench(TransportPolicy("auto", require_cuda_ipc=True), obstacle=ON_A_CPU)
    here.both()
    assert isinstance(here.transport.refusal, InvalidConfig)
    assert here.transport.refusal.field == "require_cuda_ipc"
    assert f"require-cuda-ipc: the target: {ON_A_CPU}" in str(here.transport.refusal)
    assert here.posted == []
    here = bench(TransportPolicy("auto", require_cuda_ipc=True))
    here.both()
    here.export_all(but="speculator", reason="something replaces cudaMalloc")
    assert "something replaces cudaMalloc" in str(here.transport.refusal)
    assert here.orders(Export) == []


def test_asked_for_by_name(bench):
    here = bench(TransportPolicy("memfd"))
    here.both()
    assert here.export_all() == ["memfd", "memfd"]
    here = bench(TransportPolicy("inline"))
    here.both()
    assert here.posted == []
    assert here.transport.info == ("inline", "")
    here = bench(TransportPolicy("cuda_ipc"), obstacle=ON_A_CPU)
    here.both()
    assert here.export_all() == ["memfd", "memfd"]


def test_lanes_that_are_threads_have_no_way_for_files(bench):
    here = bench(obstacle=ON_A_CPU)
    target, speculator = here.lane("target"), here.lane("speculator", HEAD)
    speculator.process.lifeline = None
    here.load(target)
    here.load(speculator)
    assert here.transport.info == ("inline", "no cuda_ipc: a lane is no process of this executor's own")


def test_what_an_exporter_made_of_its_order_is_not_believed(bench):
    here = bench(obstacle=ON_A_CPU)
    target, _ = here.both()
    order = next(order for lane, order in here.posted if lane is target)
    export = ArenaExport("mine", target.epoch, "memfd", order.nbytes, 8, "cpu", b"", 1, 1)
    here.transport.exported(target, Exported(target.epoch, order.arena, export))
    assert here.transport.info.name == "inline"
    assert "it made mine of" in here.transport.info.reason


def joined(bench):
    """Two lanes on a CPU that read each other's arenas."""
    here = bench(obstacle=ON_A_CPU)
    lanes = here.both()
    here.export_all()
    here.import_all()
    return here, *lanes


def test_a_lane_that_starts_again_is_joined_and_the_dead_one_is_out_of_reach(bench):
    here, target, speculator = joined(bench)
    before = here.transport.arena_for(target, speculator)
    here.end(target)
    assert [(lane, order.arenas) for lane, order in here.orders(Unmap)] == [(speculator, [before])]
    assert not here.transport.reaches(speculator, before)
    assert not here.transport.leases.knows(before)
    again = here.load(here.lane("target"))
    assert here.transport.arena_for(again, speculator) == ""  # it has none yet
    assert here.export_all() == ["memfd"]
    assert sorted(here.import_all()) == ["speculator", "target"]
    after = here.transport.arena_for(again, speculator)
    assert after != before
    assert here.transport.reaches(speculator, after)
    successor = here.lane("speculator", HEAD)
    assert here.transport.arena_for(again, successor) == after  # its rows are kept where they are


def test_a_later_failure_is_that_lanes_alone(bench):
    here, target, speculator = joined(bench)
    here.end(speculator)
    again = here.load(here.lane("speculator", HEAD))
    here.export_all(but="speculator")
    here.import_all(but="speculator")
    assert here.transport.info.name == "memfd"
    assert here.transport.arena_for(target, again) == ""
    here.end(again)
    third = here.load(here.lane("speculator", HEAD))
    here.export_all()
    here.import_all()
    assert here.transport.arena_for(target, third) != ""


def test_lanes_that_take_no_orders_get_none(bench):
    here, target, speculator = joined(bench)
    speculator.link.state = LinkState.STOPPING
    here.end(target)
    assert here.posted == []


def test_who_cannot_be_told_of_a_death_dies_of_it_meanwhile(bench):
    """Its own arenas go, too, and nobody stumbles over the one that is gone already."""
    here = bench(obstacle=ON_A_CPU)
    target, speculator = here.both()
    spare = here.load(here.lane("target"))
    here.export_all()
    here.import_all()
    ours = here.transport.arena_for(target, speculator)

    def post(lane, order):
        here.posted.append((lane, order))
        if lane is speculator and lane in here.lanes:
            here.end(lane)

    here.transport._post = post
    here.end(target)
    assert here.lanes == [spare]
    assert not here.transport.leases.knows(ours)
    told = [(lane, order.arenas[0].partition("/")[0]) for lane, order in here.orders(Unmap)]
    assert sorted(told, key=str) == sorted(
        [(speculator, target.epoch), (spare, speculator.epoch), (spare, target.epoch)], key=str
    )


def test_a_dead_borrowers_slots_are_free(bench):
    here, target, speculator = joined(bench)
    arena = here.transport.arena_for(target, speculator)
    refs = [SlotRef(arena, slot, 1) for slot in range(100)]
    here.transport.leases.published(refs, 0.0)
    for ref in refs:
        here.transport.leases.lend(ref, speculator.epoch, 0.0)
    here.end(speculator)
    assert here.transport.leases.take_released(target.epoch) == refs


def test_a_dying_lane_is_read_no_more_but_may_still_read(bench):
    here, target, speculator = joined(bench)
    its = here.transport.arena_for(speculator, target)
    ref = SlotRef(here.transport.arena_for(target, speculator), 0, 1)
    here.transport.leases.published([ref], 0.0)
    here.transport.leases.lend(ref, speculator.epoch, 0.0)
    here.transport.dying(speculator)
    assert [(lane, order.arenas) for lane, order in here.orders(Unmap)] == [(target, [its])]
    assert here.transport.arena_for(speculator, target) == ""
    assert not here.transport.leases.knows(its)
    assert here.transport.leases.take_released(target.epoch) == []
    again = here.load(here.lane("speculator", HEAD))
    assert {lane for lane, _ in here.posted} == {again}  # the dying one is told nothing
    here.export_all()
    here.import_all()
    here.end(speculator)
    assert here.orders(Unmap) == []
    assert here.transport.leases.take_released(target.epoch) == [ref]
    assert here.transport.arena_for(again, target) != ""


# ---------------------------------------------------------------- what is kept


def in_arena(arena: str, start: int) -> HiddenRows:
    at = Descriptor(arena, arena.partition("/")[0], start, 1, 0, 64, "bf16", (1, 32))
    return HiddenRows(start, 1, b"", at)


def test_rows_are_kept_by_keeping_their_slots():
    leases = Transport(TransportPolicy(), lambda lane, order: None, 10.0).leases
    leases.opened("t/0")
    kept = KeptRows()
    parts = [in_arena("t/0", position) for position in range(12)]
    leases.published([part.at.ref for part in parts], 0.0)
    kept.add(parts, HEAD, leases)
    assert [ref.slot for ref in leases.take_released("t")] == [0, 1, 2, 3]
    kept.add([HiddenRows(12, 1, b"xy")], HEAD, leases)  # inline, since there was no room
    assert [ref.slot for ref in leases.take_released("t")] == [4]
    kept.add([HiddenRows(20, 1, b"xy")], HEAD, leases)  # behind a gap
    assert [ref.slot for ref in leases.take_released("t")] == [5, 6, 7, 8, 9, 10, 11]


def test_rows_in_memory_that_is_gone_are_asked_for_again():
    leases = Transport(TransportPolicy(), lambda lane, order: None, 10.0).leases
    leases.opened("t/0")
    asked = request(list(range(20)))
    asked.rows.add([in_arena("t/0", 10), in_arena("t/0", 11)], HEAD, leases)
    asked.rows.fit(HEAD, leases)
    assert asked.rows.end == 12
    leases.gone("t/0")
    asked.rows.fit(HEAD, leases)
    assert asked.rows.end == 0


def test_an_arena_holds_what_all_sequences_keep():
    target = LaneSpec("target", "native", "", "fp32", "cpu", 1, 4, 64, 3)
    assert arena_bytes(target, [HEAD]) > 4 * HEAD.window * HEAD.row_bytes
    assert arena_bytes(structs.replace(target, max_sequences=1 << 20), [HEAD]) == 256 << 20
    assert arena_bytes(structs.replace(target, lane="speculator"), [HEAD]) == 64 << 10
