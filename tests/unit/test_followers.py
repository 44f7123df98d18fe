"""The first rank and the others: orders are passed on, answers awaited, failures told as they were said."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from ipc.channel import Peer
from ipc.errors import ProtocolError, RankGone
from ipc.messages import (
    WIRE_VERSION,
    Allocate,
    Close,
    Configure,
    Failed,
    Greeted,
    LaneSpec,
    Loaded,
    MemoryProfile,
    Profile,
    Profiled,
    Progressed,
    Ready,
    SlotRef,
    Stop,
    Unmap,
    Verified,
    Verify,
    VerifyItem,
    Vocabulary,
)
from ipc.q_rows import LOOKED_UP
from workers import followers as module
from workers.followers import Followers, Place, RankFailed, find_first, identity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

EPOCH = "e"
SPEC = LaneSpec("target", "toy", "", "fp32", "cpu", 1, 1, 8, ranks=3)
PROFILE = MemoryProfile("cpu", "cpu", 1, 2, 3, 4, 5, 6, 7, 64, 64, 10, 11)
READY = Ready(EPOCH, Vocabulary(8, "v"), 8, [])


class Ranks:
    """A first rank's followers, and two of them spoken for by hand."""

    def __init__(self, directory: Path) -> None:
        self.first = Followers("target", EPOCH, Place(0, 3, directory))
        endpoint = find_first(directory)
        self.peers = [Peer(endpoint, identity("target", EPOCH, rank)) for rank in (1, 2)]

    def say(self, *facts) -> None:
        """Each follower one of them."""
        for peer, fact in zip(self.peers, facts, strict=False):
            peer.send(fact)

    def hear(self) -> list:
        return [peer.receive(time.monotonic() + 10.0) for peer in self.peers]

    def serve(self) -> None:
        """All steps of a start, up to Ready."""
        self.say(*[Greeted(EPOCH, WIRE_VERSION, "target", pid) for pid in (1, 2)])
        self.first.tell(Configure(EPOCH, SPEC))
        self.say(Loaded(EPOCH, "cuda:1"), Loaded(EPOCH, "cuda:2"))
        assert self.first.join(Loaded(EPOCH, "cuda:0")) == Loaded(EPOCH, "cuda:0", peers=("cuda:1", "cuda:2"))
        self.first.tell(Profile(EPOCH))
        other = structs.replace(PROFILE, weights=9)
        self.say(Profiled(EPOCH, PROFILE), Profiled(EPOCH, other))
        assert self.first.join(Profiled(EPOCH, PROFILE)) == Profiled(EPOCH, PROFILE, (PROFILE, other))
        self.first.tell(Allocate(EPOCH, 64))
        self.say(READY, READY)
        assert self.first.join(READY) == READY
        assert self.hear() == [Configure(EPOCH, SPEC)] * 2
        assert self.hear() == [Profile(EPOCH)] * 2
        assert self.hear() == [Allocate(EPOCH, 64)] * 2

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.first.close()


@pytest.fixture
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    made = Ranks(tmp_path_factory.mktemp("r"))
    yield made
    made.close()


def test_orders_are_passed_on_and_facts_are_of_all(ranks: Ranks):
    ranks.serve()
    order = Verify(EPOCH, 7, [])
    ranks.first.tell(order)
    assert ranks.hear() == [order, order]
    ranks.say(Verified(EPOCH, 7, [], 1), Verified(EPOCH, 7, [], 2))
    own = Verified(EPOCH, 7, [], 3)
    assert ranks.first.join(own) == own


def test_stop_is_the_first_rank_s_alone(ranks: Ranks):
    ranks.serve()
    ranks.first.tell(Stop(EPOCH))
    order = Verify(EPOCH, 1, [])
    ranks.first.tell(order)
    assert ranks.hear() == [order, order]


def test_followers_judge_nothing_and_share_no_memory(ranks: Ranks):
    ranks.serve()
    ranks.first.tell(Unmap(EPOCH, ["a"]))
    item = VerifyItem(1, 0, 3, [], [5], q=[LOOKED_UP])
    ranks.first.tell(Verify(EPOCH, 1, [item], arena="a", released=[SlotRef("a", 0, 1)]))
    assert ranks.hear() == [Verify(EPOCH, 1, [structs.replace(item, q=[])])] * 2


def test_another_order_s_answer_is_an_error(ranks: Ranks):
    ranks.serve()
    ranks.first.tell(Verify(EPOCH, 7, []))
    ranks.say(Verified(EPOCH, 7, [], 1), Verified(EPOCH, 6, [], 2))
    with pytest.raises(ProtocolError, match="rank 2 answers another order than 7"):
        ranks.first.join(Verified(EPOCH, 7, [], 3))


def test_what_a_follower_fails_of_is_what_the_lane_fails_of(ranks: Ranks):
    ranks.say(*[Greeted(EPOCH, WIRE_VERSION, "target", pid) for pid in (1, 2)])
    ranks.first.tell(Configure(EPOCH, SPEC))
    ranks.say(Loaded(EPOCH, "cpu"), Failed(EPOCH, "load", "no such file"))
    with pytest.raises(RankFailed, match="rank 2: no such file") as failed:
        ranks.first.join(Loaded(EPOCH, "cpu"))
    assert failed.value.kind == "load"


def test_a_follower_that_says_what_is_not_due(ranks: Ranks):
    ranks.say(Loaded(EPOCH, "cpu"))
    with pytest.raises(ProtocolError, match="Loaded is not legal in state expected"):
        ranks.first.tell(Configure(EPOCH, SPEC))


def test_a_follower_that_is_gone(ranks: Ranks):
    ranks.serve()
    ranks.peers.pop().close()

    def tell_until_noticed() -> None:
        while True:
            ranks.first.tell(Close(EPOCH, []))
            ranks.hear()

    with pytest.raises(RankGone, match="rank 2 takes no Close"):
        tell_until_noticed()


def test_progress_is_that_of_all(ranks: Ranks, monkeypatch):
    ranks.serve()
    assert ranks.first.join(Progressed(EPOCH, 1)) == Progressed(EPOCH, 1)
    now = time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + module.SILENT_SECONDS + 1.0)
    assert ranks.first.join(Progressed(EPOCH, 2)) is None
