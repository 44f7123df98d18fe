"""The worker's loop: receive an order, hand it to the lane, reply. Owns the link and the exit code.

Knows no tensors and takes no decision: what to do is in the order, how to do it in the lane.
"""

from __future__ import annotations

import time
import traceback
from typing import TYPE_CHECKING

import psutil

from ipc.errors import MalformedFrame, PeerGone, ProtocolError
from ipc.link import Link
from ipc.messages import (
    WIRE_VERSION,
    Close,
    Configure,
    Draft,
    Drafted,
    Failed,
    Greeted,
    Open,
    PhaseReached,
    Progressed,
    Ready,
    Stop,
    Verified,
    Verify,
)
from workers import lifecycle
from workers.speculator import SpeculatorLane
from workers.target import TargetLane

if TYPE_CHECKING:
    from ipc.channel import Peer
    from ipc.messages import Fact, LaneName, Order, Phase

CONFIGURE_SECONDS = 60.0
PROGRESS_SECONDS = 1.0
_MAX_ERROR_CHARACTERS = 2000

EXIT_CODES = {"internal": 1, "configuration": 2, "load": 3, "protocol": 4, "memory": 5, "numerics": 6}


class Session:
    def __init__(self, lane: LaneName, epoch: str, peer: Peer, born: float) -> None:
        """`peer`: this lane's end of the wire, which `run` closes. `born`: when it was started, monotonic."""
        self._epoch = epoch
        self._lane_name = lane
        self._link = Link(lane)
        self._peer = peer
        self._phase_began = born
        self._configured = False
        self._leaving = False

    def leave(self) -> None:
        """Let `run` return before the next order. May be called from any thread."""
        self._leaving = True

    def run(self) -> int:
        """Serve until Stop; returns the exit code."""
        try:
            self._serve()
        except PeerGone:
            return 1
        except Exception as error:  # noqa: BLE001  the process's edge: whatever it was, the coordinator must hear of it
            traceback.print_exc()
            kind = self._kind(error)
            self._report(Failed(self._epoch, kind, _one_line(error)))
            return EXIT_CODES[kind]
        finally:
            self._peer.close()
        return 0

    def _serve(self) -> None:
        self._send(Greeted(self._epoch, WIRE_VERSION, self._lane_name, psutil.Process().pid))
        order = self._first_order()
        if not isinstance(order, Configure):
            return
        self._phase_reached("boot")
        lane = lifecycle.load(order.spec)
        self._phase_reached("load")
        lane.served.warm_up()
        self._phase_reached("warm_up")
        self._configured, served = True, lane.served
        self._send(Ready(self._epoch, served.vocabulary, served.max_model_len, served.notes))
        idle_turns = 0
        while not isinstance(order := self._receive(PROGRESS_SECONDS), Stop) and not self._leaving:
            if order is None:
                idle_turns += 1
                self._send(Progressed(self._epoch, idle_turns))
            elif (reply := self._obey(lane, order)) is not None:
                self._send(reply)

    def _first_order(self) -> Order | None:
        deadline = time.monotonic() + CONFIGURE_SECONDS
        while not self._leaving and time.monotonic() < deadline:
            if (order := self._receive(PROGRESS_SECONDS)) is not None:
                return order
        return None

    def _obey(self, lane: TargetLane | SpeculatorLane, order: Order) -> Fact | None:
        began = time.perf_counter_ns()
        match order:
            case Open():
                lane.open(order.sequences)
            case Close():
                lane.close(order.seqs)
            case Verify() if isinstance(lane, TargetLane):
                verdicts = lane.verify(order.items)
                return Verified(self._epoch, order.order, verdicts, time.perf_counter_ns() - began)
            case Draft() if isinstance(lane, SpeculatorLane):
                proposals = lane.draft(order.items)
                return Drafted(self._epoch, order.order, proposals, time.perf_counter_ns() - began)
            case _:
                raise ProtocolError(f"{type(order).__name__} is no order for the {self._lane_name} lane")
        return None

    def _receive(self, seconds: float) -> Order | None:
        order = self._peer.receive(time.monotonic() + seconds)
        if order is not None:
            if order.epoch != self._epoch:
                raise ProtocolError(f"order for epoch {order.epoch}, this is {self._epoch}")
            self._link.passed(order)
        return order

    def _send(self, fact: Fact) -> None:
        self._link.passed(fact)
        self._peer.send(fact)

    def _phase_reached(self, phase: Phase) -> None:
        now = time.monotonic()
        resident = psutil.Process().memory_info().rss
        fact = PhaseReached(self._epoch, phase, now - self._phase_began, resident)
        self._phase_began = now
        self._send(fact)

    def _report(self, failed: Failed) -> None:
        try:
            self._send(failed)
        except (PeerGone, ProtocolError):
            traceback.print_exc()

    def _kind(self, error: Exception) -> str:
        if isinstance(error, ProtocolError | MalformedFrame):
            return "protocol"
        if isinstance(error, MemoryError):
            return "memory"
        if isinstance(error, FloatingPointError):
            return "numerics"
        if isinstance(error, ValueError | OSError) and not self._configured:
            return "configuration" if isinstance(error, ValueError) else "load"
        return "internal"


def _one_line(error: Exception) -> str:
    # A message must be encodable and below the frame's caps, whatever the error quotes.
    text = " ".join(str(error).split()).encode(errors="replace").decode()[:_MAX_ERROR_CHARACTERS]
    text = text or type(error).__name__
    return (
        text if isinstance(error, ValueError | OSError | ProtocolError) else f"{type(error).__name__}: {text}"
    )
