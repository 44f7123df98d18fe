"""The other ranks of a lane, as its first rank sees them: each is told every order, and answers to it.

A follower is a worker like any other, whose coordinator is the first rank. It runs the same orders, so its
sequences and block tables are the same; only what it holds of the model is its own. Owns the hub between the
ranks. Knows no tensors; what ranks compute together passes elsewhere (workers.group).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from ipc.channel import HUB, Arrived, Garbled, Hub
from ipc.errors import PeerGone, ProtocolError, RankGone
from ipc.link import Link
from ipc.messages import (
    Configure,
    Export,
    Failed,
    Greeted,
    Import,
    Loaded,
    Profiled,
    Progressed,
    Ready,
    Stop,
    Unmap,
    Verified,
    Verify,
)

if TYPE_CHECKING:
    from pathlib import Path

    from ipc.messages import Fact, LaneName, Order

SILENT_SECONDS = 3.0
"""An idle follower says every second that its loop turns."""
_FIRST_SECONDS = 60.0
_POLL_SECONDS = 0.01
_ANSWER_SECONDS = 3600.0
"""How long to wait for a follower; the coordinator's own deadline comes first."""
_LAST_WORDS_SECONDS = 0.2
_ANSWERED = (Loaded, Profiled, Ready, Verified)


class Place(NamedTuple):
    """Which of the `ranks` of its lane a worker is; they meet in `directory`, which nobody else can enter."""

    rank: int = 0
    ranks: int = 1
    directory: Path | None = None


ALONE = Place()


def identity(lane: LaneName, epoch: str, rank: int) -> str:
    """What a worker is called on the wire."""
    return f"{lane}/{epoch}/{rank}" if rank else f"{lane}/{epoch}"


def _as_told(order: Order) -> Order | None:
    """What followers are told of an order, if anything: they judge nothing and share no memory with lanes."""
    match order:
        case Stop():
            return None  # they end with this process; none may be gone before the order at hand is answered
        case Export() | Import() | Unmap():
            return None
        case Configure():
            return structs.replace(order, spec=structs.replace(order.spec, acceptance="coupled"))
        case Verify():
            items = [structs.replace(item, q=[]) if item.q else item for item in order.items]
            return structs.replace(order, items=items, arena="", released=[])
    return order


def find_first(directory: Path) -> str:
    """The endpoint of the first rank, once it is there. Raises RankGone if it does not come."""
    deadline = time.monotonic() + _FIRST_SECONDS
    while not (directory / HUB).exists():
        if time.monotonic() >= deadline:
            raise RankGone(f"the first rank is not there after {_FIRST_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    return f"ipc://{directory / HUB}"


class RankFailed(Exception):
    """A follower said why it cannot go on; `kind` as in Failed."""

    def __init__(self, rank: int, failed: Failed) -> None:
        super().__init__(f"rank {rank}: {failed.message}")
        self.kind = failed.kind


class _Follower:
    def __init__(self, lane: LaneName, rank: int) -> None:
        self.rank = rank
        self.link = Link(lane)
        self.heard_at = time.monotonic()
        self.facts: list[Fact] = []
        """That nobody has asked for yet, but of steps and turns."""


class Followers:
    def __init__(self, lane: LaneName, epoch: str, place: Place) -> None:
        """Raises WireError if there can be no hub in the directory of `place`."""
        assert place.directory is not None, "ranks meet somewhere"
        self._epoch = epoch
        self._hub = Hub(place.directory)
        self._followers = {
            identity(lane, epoch, rank): _Follower(lane, rank) for rank in range(1, place.ranks)
        }

    def tell(self, order: Order) -> None:
        """Pass an order on. Raises RankGone if a follower takes none, RankFailed if it said why."""
        told = _as_told(order)
        if told is None:
            return
        order = told
        for name, follower in self._followers.items():
            if isinstance(order, Configure):
                self._answer(follower, Greeted)
            follower.link.passed(order)
            try:
                self._hub.send(name, order)
            except PeerGone as error:
                self.last_words()
                raise RankGone(f"rank {follower.rank} takes no {type(order).__name__}") from error

    def join(self, fact: Fact) -> Fact | None:
        """A fact of the first rank, as one of the lane: when all followers have come as far.

        None: there is nothing to say, since one of them has been silent for too long. Raises RankFailed,
        ProtocolError for followers that contradict the first rank.
        """
        if isinstance(fact, Progressed):
            return fact if self._all_turn() else None
        if not isinstance(fact, _ANSWERED):
            return fact
        answers = [self._answer(follower, type(fact)) for follower in self._followers.values()]
        match fact:
            case Loaded():
                peers = tuple(answer.device_id for answer in answers if isinstance(answer, Loaded))
                return structs.replace(fact, peers=peers)
            case Profiled():
                profiles = tuple(answer.profile for answer in answers if isinstance(answer, Profiled))
                return structs.replace(fact, peers=profiles)
            case Verified():
                for follower, answer in zip(self._followers.values(), answers, strict=True):
                    if not isinstance(answer, Verified) or answer.order != fact.order:
                        raise ProtocolError(f"rank {follower.rank} answers another order than {fact.order}")
        return fact

    def last_words(self) -> None:
        """Raises RankFailed if a follower said why it ends: what it left unsaid, its process tells."""
        self._hear(time.monotonic() + _LAST_WORDS_SECONDS, until_quiet=True)

    def close(self) -> None:
        self._hub.close()

    def _all_turn(self) -> bool:
        now = time.monotonic()
        self._hear(now, until_quiet=True)
        return all(now - follower.heard_at < SILENT_SECONDS for follower in self._followers.values())

    def _answer(self, follower: _Follower, kind: type[Fact]) -> Fact:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while not follower.facts:
            if time.monotonic() >= deadline:
                raise RankGone(f"rank {follower.rank} gives no {kind.__name__}")
            self._hear(deadline)
        fact = follower.facts.pop(0)
        if not isinstance(fact, kind):
            raise ProtocolError(
                f"rank {follower.rank} says {type(fact).__name__} where {kind.__name__} is due"
            )
        return fact

    def _hear(self, deadline: float, *, until_quiet: bool = False) -> None:
        """Take in what has come: one word, or all up to the deadline."""
        while (event := self._hub.receive(deadline)) is not None:
            if isinstance(event, Garbled):
                raise ProtocolError(f"{event.identity} sends a malformed frame ({event.reason})")
            if isinstance(event, Arrived):
                self._arrived(event)
            if not until_quiet:
                return

    def _arrived(self, event: Arrived) -> None:
        follower = self._followers.get(event.identity)
        fact = event.fact
        if follower is None or fact.epoch != self._epoch:
            raise ProtocolError(f"{event.identity} is no rank of this lane")
        follower.link.passed(fact)
        follower.heard_at = time.monotonic()
        if isinstance(fact, Failed):
            raise RankFailed(follower.rank, fact)
        if isinstance(fact, (Greeted, *_ANSWERED)):
            follower.facts.append(fact)
