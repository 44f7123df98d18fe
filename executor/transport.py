"""How tensors go from lane to lane: which way is tried, proved, chosen, and which lanes it joins.

Every lane exports an arena and reads the other's, so that both directions are proved before the first token.
What fails at the start falls back, loudly, from CUDA IPC to memfd to messages; later it falls back for the
lanes concerned alone. Sends orders by what it is given for that; knows no socket and takes no decision on
slots, which is executor.leases'.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from logging import INFO, WARNING
from typing import TYPE_CHECKING, Literal, NamedTuple

from executor.errors import InvalidConfig
from executor.events import record
from executor.hidden_rows import arena_bytes
from executor.leases import Leases, arena_name
from ipc.link import LinkState
from ipc.messages import Export, Import, Unmap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from executor.lane import Lane
    from ipc.messages import ArenaExport, Exported, Imported, LaneSpec, Loaded, Order, SharedTransport

TransportName = Literal["auto", "inline", "memfd", "cuda_ipc"]
_TAKES_ORDERS = {
    *(LinkState.LOADED, LinkState.PROFILING, LinkState.PROFILED, LinkState.PREPARING),
    *(LinkState.IDLE, LinkState.BUSY),
}


@dataclass(frozen=True, slots=True)
class TransportPolicy:
    """What the user asked for. `require_cuda_ipc`: rather no start than another way."""

    name: TransportName = "auto"
    require_cuda_ipc: bool = False


class TransportInfo(NamedTuple):
    """`name`: cuda_ipc, memfd, inline, or none while there is nothing to carry. `reason`: why none faster."""

    name: str
    reason: str


@dataclass(slots=True, eq=False)
class _Port:
    """A lane that has loaded. `arenas`: its own, None while made. `opened`: those of others that it reads.
    `failed`: it exports nothing any more."""

    lane: Lane
    no_cuda_ipc: str
    made: int = 0
    arenas: dict[str, _Arena | None] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)
    failed: bool = False
    dying: bool = False


class _Arena(NamedTuple):
    """`fd`: of a memfd, for lanes that come later; -1 if there is none."""

    export: ArenaExport
    fd: int


class Transport:
    """The coordinator's thread only, but for `info` and `slots`."""

    def __init__(
        self, policy: TransportPolicy, post: Callable[[Lane, Order], None], lease_seconds: float
    ) -> None:
        """`post` sends an order to a lane that takes some. `lease_seconds`: see Leases."""
        self._policy = policy
        self._post = post
        self._ports: dict[str, _Port] = {}
        self._left: list[str] = []
        """Ways that were not tried yet, the best first; empty before it is known what there is."""
        self._reasons: list[str] = []
        self.leases = Leases(lease_seconds)
        self.slots = self.leases.count()
        """What there was of them when somebody last looked."""
        self.chosen: str | None = None
        self.refusal: InvalidConfig | None = None
        """Why there is to be no start."""

    @property
    def info(self) -> TransportInfo:
        return TransportInfo(self.chosen or "none", "; ".join(self._reasons))

    def settled(self, specs: Iterable[LaneSpec]) -> bool:
        """Whether lanes of these specs may begin. Without a target beside them there is nothing to read."""
        lanes = {spec.lane: spec for spec in specs}
        return self.chosen is not None or "target" not in lanes or not any(map(_shares, lanes.values()))

    def arena_for(self, exporter: Lane, reader: Lane | None) -> str:
        """Where the exporter is to put what this lane reads; empty if it has to go inline."""
        port = self._ports.get(exporter.epoch)
        ready = [name for name, arena in port.arenas.items() if arena is not None] if port is not None else []
        if reader is None or not ready:
            return ""
        readers = self._ports.get(reader.epoch)
        if readers is None:  # it loads; what is kept for it until then should not have to be copied
            return ready[-1] if reader.process is None or reader.process.lifeline is not None else ""
        return next((name for name in ready if name in readers.opened), "")

    def reaches(self, reader: Lane, arena: str) -> bool:
        """Whether a lane has opened an arena."""
        port = self._ports.get(reader.epoch)
        return port is not None and arena in port.opened

    # ------------------------------------------------------------ what lanes say

    def loaded(self, lane: Lane, fact: Loaded) -> None:
        port = self._ports[lane.epoch] = _Port(lane, fact.no_cuda_ipc)
        self._advance()
        if port in self._taking_part():
            for other in self._opposite(port):
                for arena in filter(None, other.arenas.values()):
                    self._connect(arena, port)

    def exported(self, lane: Lane, fact: Exported) -> None:
        port = self._ports.get(lane.epoch)
        arena, reason = _received(lane, fact)
        if port is None or fact.arena not in port.arenas:  # of a try that was given up
            if arena is not None:
                _close(arena.fd)
            return
        if arena is None:
            del port.arenas[fact.arena]
            self._failed(port, f"the {lane.name} exports nothing: {reason}")
            return
        port.arenas[fact.arena] = arena
        self.leases.opened(fact.arena)
        for other in self._opposite(port):
            self._connect(arena, other)

    def imported(self, lane: Lane, fact: Imported) -> None:
        port = self._ports.get(lane.epoch)
        if port is None or not any(fact.arena in other.arenas for other in self._ports.values()):
            return
        if fact.reason:
            self._failed(port, f"the {lane.name} cannot read the other lane's memory: {fact.reason}")
            return
        port.opened.add(fact.arena)
        if self.chosen is None and self._joined():
            self._choose(self._left[0])

    def dying(self, lane: Lane) -> None:
        """It is being killed: what it exported is closed everywhere at once. What it was lent is its own
        until its death is certain."""
        if (port := self._ports.get(lane.epoch)) is not None:
            port.failed = port.dying = True
            self._discard(port.arenas)

    def reconcile(self, alive: Sequence[Lane]) -> None:
        """Only these lanes run. What others exported is closed everywhere at once, what they read is free."""
        epochs = {lane.epoch for lane in alive}
        gone = [self._ports.pop(epoch) for epoch in list(self._ports) if epoch not in epochs]
        for port in gone:  # who cannot be told of it dies of that, and we are called again
            self._discard(port.arenas)
            self.leases.died(port.lane.epoch)

    def look(self, now: float) -> None:
        """What time alone does."""
        for epoch, count in self.leases.look(now):
            record(WARNING, "slots_quarantined", epoch=epoch, slots=count)
        self.slots = self.leases.count()

    def close(self) -> None:
        for port in self._ports.values():
            for arena in filter(None, port.arenas.values()):
                _close(arena.fd)
        self._ports.clear()

    # ------------------------------------------------------------ how it goes on

    def _advance(self) -> None:
        """Have every lane export that is to, by the way that is chosen or tried."""
        taking_part = self._taking_part()
        if {port.lane.name for port in taking_part} != {"target", "speculator"}:
            return
        if self.chosen is None and not self._left:
            self._left = self._ways(taking_part)
        if self.refusal is not None:
            return
        way = self.chosen or self._left[0]
        if way == "inline":
            self._choose("inline")
            return
        for port in taking_part:
            if not port.arenas and not port.failed:
                self._export(port, "cuda_ipc" if way == "cuda_ipc" else "memfd")

    def _taking_part(self) -> list[_Port]:
        """Speculators that share tensors with the target, and all targets if there is one that does."""
        readers = [port for port in self._ports.values() if _shares(port.lane.spec)]
        targets = [port for port in self._ports.values() if port.lane.name == "target"]
        return [*targets, *readers] if readers else []

    def _ways(self, ports: Sequence[_Port]) -> list[str]:
        """What to try, in this order; also says why CUDA IPC is not among it."""
        policy = self._policy
        if policy.name == "inline":
            return ["inline"]
        obstacle = next((f"the {p.lane.name}: {p.no_cuda_ipc}" for p in ports if p.no_cuda_ipc), "")
        if any(port.lane.process is None or port.lane.process.lifeline is None for port in ports):
            return self._without_cuda_ipc("a lane is no process of this executor's own", ["inline"])
        if policy.name == "memfd":
            return ["memfd", "inline"]
        if obstacle:
            return self._without_cuda_ipc(obstacle, ["memfd", "inline"])
        return ["cuda_ipc"] if policy.require_cuda_ipc else ["cuda_ipc", "memfd", "inline"]

    def _without_cuda_ipc(self, obstacle: str, ways: list[str]) -> list[str]:
        self._reasons.append(f"no cuda_ipc: {obstacle}")
        if self._policy.require_cuda_ipc:
            self._refuse(obstacle)
        elif self._policy.name != "auto":
            record(WARNING, "transport_fallback", transport=self._policy.name, next=ways[0], reason=obstacle)
        return ways

    def _export(self, port: _Port, way: SharedTransport) -> None:
        if port.lane.link.state not in _TAKES_ORDERS:
            return
        name = arena_name(port.lane.epoch, port.made)
        port.made += 1
        port.arenas[name] = None
        heads = [other.lane.spec.head for other in self._ports.values()]
        nbytes = arena_bytes(port.lane.spec, [head for head in heads if head is not None])
        self._post(port.lane, Export(port.lane.epoch, name, way, nbytes))

    def _opposite(self, port: _Port) -> list[_Port]:
        return [other for other in self._taking_part() if other.lane.name != port.lane.name]

    def _connect(self, arena: _Arena, reader: _Port) -> None:
        lane = reader.lane
        if lane.process is None or lane.link.state not in _TAKES_ORDERS:
            return
        lifeline = lane.process.lifeline
        if arena.fd >= 0 and (lifeline is None or not lifeline.give(arena.export.arena, arena.fd)):
            self._failed(reader, f"no file can be sent to the {lane.name}")
            return
        self._post(lane, Import(lane.epoch, arena.export))

    def _joined(self) -> bool:
        """Whether every lane that takes part has made an arena, and reads those of the other lane."""
        ports = self._taking_part()
        pairs = [(port, other) for port in ports for other in self._opposite(port)]
        return all(other.arenas and other.arenas.keys() <= port.opened for port, other in pairs)

    def _failed(self, port: _Port, reason: str) -> None:
        if self.chosen is not None:
            port.failed = True
            record(WARNING, "transport_lost", lane=port.lane.name, epoch=port.lane.epoch, reason=reason)
            return
        if self.refusal is not None:
            return
        way = self._left.pop(0)
        self._reasons.append(f"no {way}: {reason}")
        for other in list(self._ports.values()):
            self._discard(other.arenas)
        if not self._left:
            self._refuse(reason)
            return
        record(WARNING, "transport_fallback", transport=way, next=self._left[0], reason=reason)
        self._advance()

    def _choose(self, way: str) -> None:
        if self.chosen is None:
            self.chosen = way
            record(INFO, "transport_chosen", transport=way, reason=self.info.reason)

    def _refuse(self, reason: str) -> None:
        self.refusal = InvalidConfig(
            "require_cuda_ipc", f"require-cuda-ipc: {reason}; try --transport auto without it"
        )

    def _discard(self, arenas: dict[str, _Arena | None]) -> None:
        """Nobody is to use these any more, whoever made them."""
        names = list(arenas)
        for arena in [arenas.pop(name) for name in names]:
            if arena is not None:
                _close(arena.fd)
        for name in names:
            self.leases.gone(name)
        for port in list(self._ports.values()):
            port.opened.difference_update(names)
            told = port.lane.process is not None and port.lane.link.state in _TAKES_ORDERS and not port.dying
            if names and told:
                self._post(port.lane, Unmap(port.lane.epoch, names))


def _shares(spec: LaneSpec) -> bool:
    """Whether a speculator reads tensors of the target's, or the target its own."""
    return spec.head is not None or spec.q_arena > 0


def _received(lane: Lane, fact: Exported) -> tuple[_Arena | None, str]:
    """The arena with its file, or why there is none. What contradicts the order is none either."""
    export = fact.export
    if export is None:
        return None, fact.reason
    if (export.arena, export.epoch) != (fact.arena, lane.epoch):
        return None, f"asked for {fact.arena}, it made {export.arena} of {export.epoch}"
    if export.transport == "cuda_ipc":
        return _Arena(export, -1), ""
    lifeline = lane.process.lifeline if lane.process is not None else None
    fd = lifeline.take(fact.arena) if lifeline is not None else None
    return (None, "its file did not come") if fd is None else (_Arena(export, fd), "")


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
