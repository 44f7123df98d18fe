"""What it costs to hand a block of tensor to another process: by an arena's descriptor, and within a message.

Real processes, and the messages that lanes use, encoded and checked as theirs are. Both ways, and the bare
round trip that neither could do without, are measured side by side. Run as a program it is the other process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from executor.bench.percentile import percentile
from executor.errors import SpeclaneError
from executor.rundir import RunDir
from ipc import codec
from ipc.arena import Arena, Importer
from ipc.channel import Arrived, Hub, Peer
from ipc.descriptor import tensor_bytes
from ipc.lifeline import Lifeline, WorkerEnd
from ipc.messages import WIRE_VERSION, Draft, Drafted, DraftItem, Greeted, HiddenRows, Import, Imported

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from ipc.messages import Order, SlotRef

F = TypeVar("F")

SHAPE = (8, 7, 49152)
"""Of a block, in float32: full rows of eight sequences of seven positions over SmolLM2's vocabulary."""
_EPOCH = "handoff"
_IDENTITY = f"speculator/{_EPOCH}"
_ARENA = f"{_EPOCH}/0"
_PART_BYTES = 4 << 20
"""A message's binary values are capped: a block that goes within one is cut."""
_WARM_UP = 5
_SECONDS = 60.0
_ORPHAN_SECONDS = 1.0


class Handoff:
    """A context; inside it there is a process that takes what it is handed, and says so."""

    def __enter__(self) -> Handoff:
        """Raises InvalidConfig, WireError or OSError if it cannot be started."""
        self._nbytes = tensor_bytes("fp32", SHAPE)
        with ExitStack() as undo:
            rundir = RunDir()
            undo.callback(rundir.remove)
            self._hub = Hub(rundir.path)
            undo.callback(self._hub.close)
            lifeline = Lifeline()
            undo.callback(lifeline.close)
            self._arena = Arena(_ARENA, _EPOCH, 2 * self._nbytes, "memfd", slots=4)
            undo.callback(self._arena.close)
            command = [sys.executable, "-P", "-m", "executor.bench.handoff", self._hub.endpoint]
            process = undo.enter_context(
                subprocess.Popen(
                    [*command, str(lifeline.worker_fd)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(lifeline.worker_fd,),
                )
            )
            undo.callback(process.kill)
            lifeline.handed_over()
            self._answer(Greeted)
            lifeline.give(_ARENA, self._arena.fd)
            if reason := self._ask(Import(_EPOCH, self._arena.export), Imported).reason:
                raise SpeclaneError(f"the block's memory cannot be shared: {reason}")
            self._block = os.urandom(self._nbytes)
            self._parts = [
                HiddenRows(0, 1, self._block[first : first + _PART_BYTES])
                for first in range(0, self._nbytes, _PART_BYTES)
            ]
            self._undo = undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def by_descriptor(self) -> float:
        """Microseconds from a block that was written in place until its slot is free again."""
        slot = self._arena.reserve(self._nbytes)
        assert slot is not None, "the slot of the time before is free again"
        began = time.perf_counter_ns()
        descriptor = self._arena.publish(slot, "fp32", SHAPE)
        self._arena.release(self._hand([HiddenRows(0, 1, b"", descriptor)]))
        return (time.perf_counter_ns() - began) / 1000

    def by_copy(self) -> float:
        """The same with the block copied into the arena, for who cannot write it there."""
        began = time.perf_counter_ns()
        descriptor = self._arena.put(self._block, "fp32", SHAPE)
        assert descriptor is not None, "the slot of the time before is free again"
        self._arena.release(self._hand([HiddenRows(0, 1, b"", descriptor)]))
        return (time.perf_counter_ns() - began) / 1000

    def by_message(self) -> float:
        """The same with the block within the message."""
        began = time.perf_counter_ns()
        self._hand(self._parts)
        return (time.perf_counter_ns() - began) / 1000

    def bare(self) -> float:
        """A round trip that hands nothing over."""
        began = time.perf_counter_ns()
        self._hand([])
        return (time.perf_counter_ns() - began) / 1000

    def _hand(self, rows: list[HiddenRows]) -> list[SlotRef]:
        return self._ask(Draft(_EPOCH, 0, [DraftItem(0, 0, 1, [], 0, rows)]), Drafted).acks

    def _ask(self, order: Order, kind: type[F]) -> F:
        self._hub.send(_IDENTITY, order)
        return self._answer(kind)

    def _answer(self, kind: type[F]) -> F:
        event = self._hub.receive(time.monotonic() + _SECONDS)
        if not isinstance(event, Arrived) or not isinstance(event.fact, kind):
            raise SpeclaneError(f"the process that takes the blocks does not answer: {event}")
        return event.fact


def work_us(count: int) -> dict[str, float]:
    """Computing time, in microseconds, that a descriptor takes of both processes together: p50 and p99.

    Done by one thread without a wire, less what the same messages take without it: other work on the machine
    does not show in it.
    """
    nbytes = tensor_bytes("fp32", SHAPE)
    arena, importer = Arena("work/0", _EPOCH, 2 * nbytes, "memfd", slots=4), Importer()
    importer.open(arena.export, os.dup(arena.fd))
    with_one, without = [], []
    for _ in range(_WARM_UP + count):
        began = time.thread_time_ns()
        slot = arena.reserve(nbytes)
        assert slot is not None, "the slot of the time before is free again"
        descriptor = arena.publish(slot, "fp32", SHAPE)
        arena.release(_both_ends(importer, [HiddenRows(0, 1, b"", descriptor)]))
        handed = time.thread_time_ns()
        _both_ends(importer, [])
        with_one.append((handed - began) / 1000)
        without.append((time.thread_time_ns() - handed) / 1000)
    importer.close_all()
    arena.close()
    bare = percentile(without[_WARM_UP:], 0.50)
    return {
        name: round(percentile(with_one[_WARM_UP:], share) - bare, 2)
        for name, share in (("p50", 0.50), ("p99", 0.99))
    }


def _both_ends(importer: Importer, rows: list[HiddenRows]) -> list[SlotRef]:
    order = codec.decode_order(codec.encode(Draft(_EPOCH, 0, [DraftItem(0, 0, 1, [], 0, rows)])))
    assert isinstance(order, Draft), "what was encoded"
    reply = codec.decode_fact(
        codec.encode(Drafted(_EPOCH, 0, [], 0, 0, _look(importer, order.items[0].rows)))
    )
    assert isinstance(reply, Drafted), "what was encoded"
    return reply.acks


def measure(*, count: int) -> dict[str, Any]:
    """Times of `count` hand-offs each way in microseconds; light ones in turns, and heavy ones in turns."""
    ways: dict[str, Callable[[Handoff], float]] = {
        "descriptor": Handoff.by_descriptor,
        "copy": Handoff.by_copy,
        "message": Handoff.by_message,
        "bare": Handoff.bare,
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    with Handoff() as handoff:
        # Apart, since on a busy machine who has just moved megabytes waits longer for its next turn.
        for light_or_heavy in (("descriptor", "bare"), ("message", "copy")):
            for number in range(_WARM_UP + count):
                for way in light_or_heavy:
                    took = ways[way](handoff)
                    if number >= _WARM_UP:
                        times[way].append(took)
    p50 = {way: percentile(all_times, 0.50) for way, all_times in times.items()}
    return {
        "shape": list(SHAPE),
        "bytes": 4 * prod(SHAPE),
        "count": count,
        "transport": "memfd",
        **{
            f"{way}_us": {"p50": round(p50[way], 2), "p99": round(percentile(times[way], 0.99), 2)}
            for way in ways
        },
        "times_less": round(p50["message"] / p50["descriptor"], 1),
        "overhead_us": round(p50["descriptor"] - p50["bare"], 2),
        "work_us": work_us(count),
    }


def take(endpoint: str, death_fd: int) -> None:
    """What the other process does: it looks at both ends of what it is handed, and lets it go."""
    parent = os.getppid()
    end, importer = WorkerEnd(death_fd), Importer()
    peer = Peer(endpoint, _IDENTITY)
    peer.send(Greeted(_EPOCH, WIRE_VERSION, "speculator", os.getpid()))
    while os.getppid() == parent:
        match peer.receive(time.monotonic() + _ORPHAN_SECONDS):
            case Import(export=export):
                importer.open(export, end.take(export.arena))
                importer.prove(export.arena)
                peer.send(Imported(_EPOCH, export.arena))
            case Draft(items=[item]):
                peer.send(Drafted(_EPOCH, 0, [], 0, 0, _look(importer, item.rows)))


def _look(importer: Importer, rows: list[HiddenRows]) -> list[SlotRef]:
    acks: list[SlotRef] = []
    for part in rows:
        span = part.data if part.at is None else importer.view(part.at)
        assert not isinstance(span, bytes | memoryview) or span[0] + span[-1] >= 0
        if part.at is not None:
            acks += importer.ack(part.at)
    return acks


if __name__ == "__main__":
    take(sys.argv[1], int(sys.argv[2]))
