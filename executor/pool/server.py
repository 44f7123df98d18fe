"""The shell of a speculator server: its clients on one side, its lane on the other. One thread.

The lane is a worker process as an executor starts it, watched and started again alike; for its clients this
server stands in for it, message by message. When the lane dies all of them are told, and attach again: each
knows its own tokens, and the server keeps none.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from logging import INFO, WARNING
from typing import TYPE_CHECKING

from executor.admission import KvRoom
from executor.errors import InvalidConfig, LaneFailed
from executor.events import record
from executor.lanes import Lanes
from executor.notify import Notifier
from executor.pool.client import Client, Overdrawn, Terms
from executor.pool.herald import Herald
from executor.pool.suspects import Suspects
from executor.pool.turns import Turns
from ipc import codec
from ipc.errors import MalformedFrame, ProtocolError
from ipc.link import LinkState
from ipc.messages import (
    WIRE_VERSION,
    Allocate,
    Attach,
    Cancel,
    Close,
    Configure,
    Draft,
    Drafted,
    DraftItem,
    Failed,
    Greeted,
    Loaded,
    MemoryProfile,
    Open,
    PhaseReached,
    Profile,
    Profiled,
    Progressed,
    Ready,
    Stop,
)
from ipc.relay import GOODBYE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from executor.config import Config
    from executor.lane import Lane
    from executor.pool.turns import Bid
    from ipc.door import Door
    from ipc.messages import Fact, LaneSpec, Offer, Order

BEAT_SECONDS = 1.0
"""How often a client hears that the server is there, and is seen to be."""
_NAME_CHARACTERS = 64
_SPEAKABLE = {LinkState.IDLE, LinkState.BUSY}


class SpeculatorServer:
    def __init__(self, config: Config, spec: LaneSpec, offer: Offer, door: Door, clients: int) -> None:
        """`config.max_sequences`: of one client; `spec.max_sequences`: of all `clients` together. The door is
        the caller's to close. Raises InvalidConfig, SpeclaneError."""
        self._config = config
        self.offer = offer
        self._door = door
        self._most = clients
        self._lanes = Lanes(
            [spec], config.timeouts, config.recovery, config.memory, config.lanes, config.placements
        )
        self._clients: dict[str, Client] = {}
        self._turns = Turns()
        self._suspects = Suspects()
        self._numbers = itertools.count()
        self._orders = itertools.count(1)
        self._closing: list[int] = []
        self._chosen: list[Bid] = []
        self._asked: dict[str, int] = {}
        self._hurried: set[str] = set()
        self._epoch = ""
        self._terms: Terms | None = None
        self._next_beat = 0.0
        self._herald = Herald(Notifier(os.environ), offer.name, door.address)
        self._stopping = False
        self.strangers = 0
        """Frames of those who are no clients, or none any more."""

    # ------------------------------------------------------------ life

    def serve(self, told: Callable[[], None]) -> None:
        """Until `stop`; `told` is called once there is something to be had.

        Raises InvalidConfig or LaneFailed if the lane cannot serve, or dies too often.
        """
        try:
            self._lanes.attend(self._door.questions, self._door.admit)
            self._lanes.attend(self._door.knocks, self._listen)
            self._lanes.start(time.monotonic() + self._config.timeouts.load)
            self._look_after_lane()
            if not self._stopping:
                told()
            while not self._stopping:
                self._lanes.turn(self._next_beat)
                self._look_after_lane()
                self._answer()
                self._give_turn()
                self._beat()
        finally:
            self._herald.stopping()
            for client in list(self._clients.values()):
                self._say_goodbye(client)
            self._lanes.stop()

    def stop(self) -> None:
        """May be called from any thread, and by a signal, while `serve` runs."""
        self._stopping = True
        self._lanes.halt()

    # ------------------------------------------------------------ clients

    def _listen(self) -> None:
        for identity, user, frame in self._door.receive():
            client = self._clients.get(identity)
            if frame == GOODBYE:
                if client is not None:
                    self._drop(client, "left")
                continue
            try:
                order = codec.decode_order(frame)
            except MalformedFrame as error:
                self._expel(client, "protocol", f"sent a malformed frame ({error})")
                continue
            if isinstance(order, Attach):
                self._attach(identity, user, order)
            elif client is None:
                self.strangers += 1
            else:
                self._heard(client, order)

    def _attach(self, identity: str, user: str, order: Attach) -> None:
        if (before := self._clients.get(identity)) is not None:
            self._drop(before, "attached anew")
        name = user or "".join(filter(str.isprintable, order.client))[:_NAME_CHARACTERS] or identity
        client = Client(identity, order.epoch, name)
        client.link.passed(order)
        if order.wire_version != WIRE_VERSION:
            self._greet(client)  # it says which version this is, and what to do about that is theirs
            return
        self._clients[identity] = client
        if len(self._clients) > self._most:
            advice = f"serves {self._most} clients already; try another server, or --clients {self._most + 1}"
            self._expel(client, "configuration", advice)
        elif seconds := self._suspects.barred(name, time.monotonic()):
            reason = f"does not serve {name} for {seconds:.0f} s more: the model died over it too often"
            self._expel(client, "configuration", reason)
        elif self._terms is not None:
            self._admit(client, self._terms)

    def _admit(self, client: Client, terms: Terms) -> None:
        client.admit(terms)
        record(INFO, "client_attached", client=client.name, epoch=client.epoch, clients=len(self._clients))
        self._greet(client)

    def _greet(self, client: Client) -> None:
        self._send(client, Greeted(client.epoch, WIRE_VERSION, "speculator", os.getpid()))

    def _heard(self, client: Client, order: Order) -> None:
        try:
            if order.epoch != client.epoch:
                raise ProtocolError(f"order for epoch {order.epoch}, this is {client.epoch}")
            client.count_frame()
            client.link.passed(order)
            self._obey(client, order)
        except ProtocolError as error:
            self._expel(client, "protocol", str(error))
        except Overdrawn as error:
            self._expel(client, "memory", str(error))

    def _obey(self, client: Client, order: Order) -> None:
        epoch = client.epoch
        match order:
            case Configure():
                if reason := client.configured(order):
                    self._expel(client, "configuration", reason)
                else:
                    self._send(client, PhaseReached(epoch, "load", 0.0, 0, self.offer.name))
                    apart = "it is at a server"
                    self._send(client, Loaded(epoch, _device_id(), no_cuda_ipc=apart, serves=self.offer))
            case Profile():
                self._send(client, Profiled(epoch, self._profile(client.terms.room)))
            case Allocate():
                client.allocate(order)
                self._send(client, self._ready(client))
            case Open():
                client.open(order.sequences, self._numbers)
            case Close():
                client.close(order.seqs)
            case Draft():
                client.ask(order)
                self._turns.ask(client.identity)
            case Cancel():
                if not client.hurry(order.order):
                    self._cancel(client, order.order)
            case Stop():
                self._say_goodbye(client)
            case _:
                raise ProtocolError(
                    f"{type(order).__name__} is no order for a server, which shares no memory"
                )

    def _cancel(self, client: Client, order: int) -> None:
        """The lane hears of it once nobody waits any more for what it is at."""
        if self._asked.get(client.identity) != order:
            return
        self._hurried.add(client.identity)
        lane = self._lane
        if lane.in_flight is not None and {bid.client for bid in self._chosen} <= self._hurried:
            self._lanes.tell(lane, Cancel(lane.epoch, lane.in_flight))

    def _profile(self, room: KvRoom) -> MemoryProfile:
        """A client's share: of its own host's memory it is nothing."""
        return MemoryProfile(
            device=f"server {socket.gethostname()}",
            device_id=_device_id(),
            process=0,
            weights=0,
            activations=0,
            workspace=0,
            graphs=0,
            load_peak=0,
            kv_bytes_per_token=0,
            kv_block=room.block,
            max_kv_tokens=room.tokens,
            free=0,
            held=0,
        )

    def _ready(self, client: Client) -> Ready:
        ready = self._lane.ready
        assert ready is not None, "clients are admitted by a lane that serves"
        notes = [f"{self.offer.name} of a server, shared with others", *ready.notes]
        return Ready(client.epoch, ready.vocabulary, ready.max_model_len, notes)

    def _send(self, client: Client, fact: Fact) -> None:
        client.link.passed(fact)
        if not self._door.send(client.identity, codec.encode(fact)):
            self._drop(client, "is gone")

    def _say_goodbye(self, client: Client) -> None:
        self._door.send(client.identity, GOODBYE)
        self._drop(client, "left")

    def _expel(self, client: Client | None, kind: str, reason: str) -> None:
        """It is told why, and none of it is left."""
        if client is None:
            self.strangers += 1
            return
        self._door.send(client.identity, codec.encode(Failed(client.epoch, kind, reason)))
        self._drop(client, reason, WARNING)

    def _drop(self, client: Client, reason: str, level: int = INFO) -> None:
        if self._clients.get(client.identity) is not client:
            return
        del self._clients[client.identity]
        self._closing += client.leave()
        self._turns.forget(client.identity)
        record(level, "client_left", client=client.name, epoch=client.epoch, reason=reason)

    def _beat(self) -> None:
        """Clients hear of the server, and who does not take that is gone."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + min(BEAT_SECONDS, self._herald.period)
        self._herald.tell(self._lane, len(self._clients))
        for client in list(self._clients.values()):
            if client.link.state in _SPEAKABLE:
                client.beats += 1
                self._send(client, Progressed(client.epoch, client.beats))

    # ------------------------------------------------------------ the lane

    @property
    def _lane(self) -> Lane:
        lane = self._lanes.speculator
        assert lane is not None, "a server has a speculator, if only a dead one"
        return lane

    def _look_after_lane(self) -> None:
        """Raises LaneFailed if it is given up."""
        lane = self._lane
        if self._terms is not None and (lane.epoch != self._epoch or not lane.serving):
            self._lost()
        if self._terms is None and lane.serving:
            self._epoch, self._terms = lane.epoch, self._share(lane)
            for client in list(self._clients.values()):
                self._admit(client, self._terms)
        if "speculator" in self._lanes.supervisor.given_up:
            raise LaneFailed("speculator", lane.down_because, lane.stderr_tail)

    def _lost(self) -> None:
        """All clients start over; those over which it died are watched."""
        names = [client.name for client in self._served()]
        self._suspects.died(names, time.monotonic())
        self._terms = None
        self._chosen, self._closing = [], []
        for client in list(self._clients.values()):
            self._expel(client, "internal", "the server's model died, and is started again")
        self._closing = []

    def _share(self, lane: Lane) -> Terms:
        """Raises InvalidConfig if there is not enough for all."""
        ready, room = lane.ready, lane.room
        assert ready is not None, "a lane that serves has said what it is"
        assert room is not None, "a lane that serves was told what it holds"
        tokens = room.blocks // self._most * room.block
        if tokens == 0:
            raise InvalidConfig(
                "kv_tokens",
                f"kv_tokens: {room.tokens} are not enough for {self._most} clients; "
                f"try {self._most * room.block}, or fewer --clients",
            )
        head = self.offer.head
        return Terms(
            seats=self._config.max_sequences,
            max_model_len=ready.max_model_len,
            room=KvRoom(tokens, room.block),
            k=self._config.num_speculative_tokens,
            vocabulary=ready.vocabulary.size,
            row_bytes=head.row_bytes if head is not None else 0,
            acceptance=lane.spec.acceptance,
        )

    def _served(self) -> list[Client]:
        """For whom the lane drafts now, as far as they are still there."""
        identities = [str(bid.client) for bid in self._chosen]
        return [self._clients[identity] for identity in identities if identity in self._clients]

    def _answer(self) -> None:
        if not isinstance(drafted := self._lanes.take(self._lane), Drafted):
            return
        self._answered(drafted)

    def _answered(self, drafted: Drafted) -> None:
        served, self._chosen, paid = self._served(), [], self._chosen
        here = {client.identity for client in served}
        self._suspects.answered(client.name for client in served)
        self._turns.pay([bid for bid in paid if bid.client in here], drafted.busy_ns * 1e-9)
        for client in served:
            client.answered()
            items = client.its(drafted)
            self._send(client, Drafted(client.epoch, self._asked[client.identity], items, drafted.busy_ns))

    def _give_turn(self) -> None:
        lane = self._lane
        if not lane.idle or self._chosen or lane.reply is not None:
            return
        for client in self._clients.values():
            self._closing += client.closing
            client.closing = []
        if self._closing:
            self._lanes.tell(lane, Close(lane.epoch, self._closing))
            self._closing = []
        waiting = [client for client in self._clients.values() if client.waiting is not None]
        if waiting:
            self._draft(lane, waiting)

    def _draft(self, lane: Lane, waiting: Sequence[Client]) -> None:
        self._chosen = self._turns.choose(
            [client.bid(alone=self._suspects.alone(client.name)) for client in waiting]
        )
        items: list[DraftItem] = []
        budget = None
        self._asked, self._hurried = {}, set()
        for client in self._served():
            assert client.waiting is not None, "it has just made a bid"
            self._asked[client.identity] = client.waiting.order
            budget = client.waiting.budget if len(self._chosen) == 1 else None
            opened, its = client.take()
            for one in opened:  # a message each: frames are capped
                self._lanes.tell(lane, Open(lane.epoch, [one]))
            items += its
        if items:
            self._lanes.ask(lane, Draft(lane.epoch, next(self._orders), items, budget))
        else:  # all that they asked about is closed by now
            self._answered(Drafted(lane.epoch, 0, [], 0))


def _device_id() -> str:
    """Of what clients get here; no device of theirs is called so."""
    return f"server {socket.gethostname()}/{os.getpid()}"
