"""The worker's loop: receive an order, hand it to the lane, reply. Owns the link and the exit code.

Knows no tensors and takes no decision: what to do is in the order, how to do it in the lane.
"""

from __future__ import annotations

import time
import traceback
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import psutil

from ipc.errors import RANK_GONE_STATUS, MalformedFrame, PeerGone, ProtocolError, RankGone
from ipc.link import Link
from ipc.messages import (
    WIRE_VERSION,
    Allocate,
    Cancel,
    Close,
    Configure,
    Draft,
    Drafted,
    Export,
    Failed,
    Greeted,
    Import,
    Loaded,
    Open,
    PhaseReached,
    Profile,
    Profiled,
    Progressed,
    Ready,
    Stop,
    Unmap,
    Verified,
    Verify,
)
from workers import lifecycle
from workers.followers import ALONE, Followers, RankFailed
from workers.lifecycle import Lifecycle
from workers.speculator import SpeculatorLane
from workers.target import TargetLane
from workers.tensor_plane import TensorPlane

if TYPE_CHECKING:
    from ipc.channel import Peer
    from ipc.lifeline import WorkerEnd
    from ipc.messages import Fact, LaneName, Order, Phase
    from workers.followers import Place

CONFIGURE_SECONDS = 60.0
TURN_SECONDS = 3600.0
"""How long to wait for the other lane, which may load much; the coordinator's own deadline comes first."""
PROGRESS_SECONDS = 1.0
_MAX_ERROR_CHARACTERS = 2000

EXIT_CODES = {"internal": 1, "configuration": 2, "load": 3, "protocol": 4, "memory": 5, "numerics": 6}


class Session:
    def __init__(
        self,
        lane: LaneName,
        epoch: str,
        peer: Peer,
        born: float,
        lifeline: WorkerEnd | None = None,
        place: Place = ALONE,
    ) -> None:
        """`peer`: this lane's end of the wire, which `run` closes. `born`: when it was started, monotonic.
        `lifeline`: by which files come and go, if the lane is a process of its own.

        `place`: which rank of the lane this is. The first one passes all orders on to the others, and says
        what they have done together; the peer of the others is the first. Raises WireError.
        """
        leads = place.ranks > 1 and place.rank == 0
        self._place = place
        self._followers = Followers(lane, epoch, place) if leads else None
        self._epoch = epoch
        self._lane_name = lane
        self._link = Link(lane)
        self._peer = peer
        self._start = Lifecycle(self._reached, born)
        self._leaving = False
        self._early: deque[Order] = deque()  # what came while another order was obeyed
        self._cancelled_order = 0
        self._plane = TensorPlane(epoch, lifeline)

    def leave(self) -> None:
        """Let `run` return before the next order. May be called from any thread."""
        self._leaving = True

    def run(self) -> int:
        """Serve until Stop; returns the exit code."""
        try:
            self._serve_together()
        except RankGone:
            traceback.print_exc()
            return RANK_GONE_STATUS
        except PeerGone:
            return RANK_GONE_STATUS if self._place.rank else 1
        except Exception as error:  # noqa: BLE001  the process's edge: whatever it was, the coordinator must hear of it
            traceback.print_exc()
            kind = self._kind(error)
            self._report(Failed(self._epoch, kind, _one_line(error)))
            return EXIT_CODES[kind]
        finally:
            self._plane.close()
            self._peer.close()
            if self._followers is not None:
                self._followers.close()
        return 0

    def _serve_together(self) -> None:
        """A rank that is gone may have said why: then that is the error."""
        try:
            self._serve()
        except RankGone:
            if self._followers is not None:
                self._followers.last_words()
            raise

    def _serve(self) -> None:
        lane = self._come_to_serve()
        idle_turns = 0
        while lane and not isinstance(order := self._receive(PROGRESS_SECONDS), Stop) and not self._leaving:
            if order is None:
                idle_turns += 1
                self._send(Progressed(self._epoch, idle_turns))
            elif (reply := self._obey(lane, order)) is not None:
                self._send(reply)

    def _come_to_serve(self) -> TargetLane | SpeculatorLane | None:
        """All steps of the start, up to Ready; None if the coordinator wants no lane any more."""
        lane = self._load()
        if lane is None or not isinstance(self._await(TURN_SECONDS), Profile):
            return None
        step, served = self._start.step, lane.served
        with step("profile"):
            profile = served.profile()
        with step("capacity"):
            self._send(Profiled(self._epoch, profile))
            order = self._await(TURN_SECONDS)
        if not isinstance(order, Allocate):
            return None
        with step("allocate") as outcome:
            served.allocate(order.kv_tokens)
            outcome.append(f"{order.kv_tokens} tokens")
        with step("warm_up"):
            served.warm_up()
        with step("capture") as outcome:
            outcome.append(served.capture())
        with step("lock"):
            served.lock()
        with step("serve"):
            about = served.vocabulary, served.max_model_len, served.notes, served.pass_tokens
        self._send(Ready(self._epoch, *about, served.step_times))
        return lane

    def _load(self) -> TargetLane | SpeculatorLane | None:
        """The first steps, up to Loaded; None if there is no order to load."""
        step = self._start.step
        with step("boot"):
            self._send(Greeted(self._epoch, WIRE_VERSION, self._lane_name, psutil.Process().pid))
            order = self._await(CONFIGURE_SECONDS)
        if not isinstance(order, Configure):
            return None
        with step("load"):
            lane = lifecycle.load(order.spec, self._place)
        with step("attention_setup"):
            lane.served.set_up_attention()
        lane.plane = self._plane
        device_id = lane.served.device_id
        self._send(Loaded(self._epoch, device_id, self._plane.settle_on(device_id)))
        return lane

    def _await(self, seconds: float) -> Order | None:
        """The next order of the start, or None if there is none in time or the lane is to go."""
        deadline = time.monotonic() + seconds
        while not self._leaving and time.monotonic() < deadline:
            order = self._receive(PROGRESS_SECONDS)
            if isinstance(order, Export | Import | Unmap):
                self._obey_about_arenas(order)
            elif order is not None:
                return order
        return None

    def _obey_about_arenas(self, order: Export | Import | Unmap) -> None:
        if (answer := self._plane.obey(order)) is not None:
            self._send(answer)

    def _obey(self, lane: TargetLane | SpeculatorLane, order: Order) -> Fact | None:
        began = time.perf_counter_ns()
        match order:
            case Export() | Import() | Unmap():
                self._obey_about_arenas(order)
            case Open():
                lane.open(order.sequences)
            case Close():
                lane.close(order.seqs)
            case Cancel():
                pass  # it met the answer on its way
            case Verify() if isinstance(lane, TargetLane):
                self._plane.release(order.released)
                verdicts, pending = lane.verify(order.items, order.prefill, order.taps, order.arena)
                acks = self._plane.acks()
                if self._place.rank > 0:  # the first rank judges
                    verdicts, pending = [], []
                busy, reused = time.perf_counter_ns() - began, lane.served.reused_tokens
                return Verified(self._epoch, order.order, verdicts, busy, pending, reused, acks)
            case Draft() if isinstance(lane, SpeculatorLane):
                self._plane.release(order.released)
                cancelled = partial(self._cancelled, order.order)
                proposals = lane.draft(order.items, order.budget, order.arena, cancelled)
                acks = self._plane.acks()
                busy, reused = time.perf_counter_ns() - began, lane.served.reused_tokens
                return Drafted(self._epoch, order.order, proposals, busy, reused, acks)
            case _:
                raise ProtocolError(f"{type(order).__name__} is no order for the {self._lane_name} lane")
        return None

    def _cancelled(self, number: int) -> bool:
        """Whether this order need not be obeyed to the end; called between its steps. Other orders wait."""
        while (order := self._hear(0.0)) is not None:
            if isinstance(order, Cancel):
                self._cancelled_order = order.order
            else:
                self._early.append(order)
        return self._cancelled_order == number or any(isinstance(order, Stop) for order in self._early)

    def _receive(self, seconds: float) -> Order | None:
        return self._early.popleft() if self._early else self._hear(seconds)

    def _hear(self, seconds: float) -> Order | None:
        order = self._peer.receive(time.monotonic() + seconds)
        if order is not None:
            if order.epoch != self._epoch:
                raise ProtocolError(f"order for epoch {order.epoch}, this is {self._epoch}")
            self._link.passed(order)
            if self._followers is not None:
                self._followers.tell(order)
        return order

    def _send(self, fact: Fact) -> None:
        told = fact if self._followers is None else self._followers.join(fact)
        if told is not None:
            self._link.passed(told)
            self._peer.send(told)

    def _reached(self, phase: Phase, seconds: float, outcome: str) -> None:
        resident = psutil.Process().memory_info().rss
        self._send(PhaseReached(self._epoch, phase, seconds, resident, outcome))

    def _report(self, failed: Failed) -> None:
        try:
            self._send(failed)
        except (PeerGone, ProtocolError):
            traceback.print_exc()

    def _kind(self, error: Exception) -> str:
        if isinstance(error, RankFailed):
            return error.kind
        if isinstance(error, ProtocolError | MalformedFrame):
            return "protocol"
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
            return "memory"  # a tensor library's own is no MemoryError, and not every lane has that library
        if isinstance(error, FloatingPointError):
            return "numerics"
        if isinstance(error, ValueError | OSError) and self._start.phase != "serve":
            return "configuration" if isinstance(error, ValueError) else "load"
        return "internal"


def _one_line(error: Exception) -> str:
    # A message must be encodable and below the frame's caps, whatever the error quotes.
    text = " ".join(str(error).split()).encode(errors="replace").decode()[:_MAX_ERROR_CHARACTERS]
    text = text or type(error).__name__
    plain = isinstance(error, ValueError | OSError | ProtocolError | RankFailed)
    return text if plain else f"{type(error).__name__}: {text}"
