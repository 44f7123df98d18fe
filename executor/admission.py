"""Who runs and who waits, where the memory for keys and values is short. Pure.

Requests come first and go last in the order in which they were submitted: a waiting one joins only when all
that came before it have, and who has to leave is the youngest that runs. It waits in front of all others and
is run again from its committed tokens. So the oldest always goes on, and whoever waits becomes the oldest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from executor.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from executor.request import Request


class KvRoom(NamedTuple):
    """What a lane can hold: so many tokens, handed out in blocks of so many."""

    tokens: int
    block: int

    @property
    def blocks(self) -> int:
        return self.tokens // self.block

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block)


class Demand(NamedTuple):
    """How requests fill a lane: drafts of `k` tokens after what is committed, up to `max_model_len` in all.

    What sequences share is not counted, so a lane never needs more than it is held to need here.
    """

    room: KvRoom
    k: int
    max_model_len: int

    def now(self, request: Request) -> int:
        """Blocks that a request can fill in the next round."""
        return self.room.blocks_for(min(len(request.tokens) + self.k, self.max_model_len))

    def soon(self, request: Request) -> int:
        """The same, and the block after that if it may still grow so far."""
        end = min(request.prompt_len + request.params.max_tokens, self.max_model_len)
        return max(self.now(request), min(self.now(request) + 1, self.room.blocks_for(end)))


def check_fits(prompt: int, max_tokens: int, demand: Demand, context: int) -> None:
    """Raises InvalidRequest for what will never fit into memory. All lengths in tokens.

    context: the longest sequence if memory were no matter, where a text just ends.
    """
    most, wanted = demand.max_model_len, min(prompt + max_tokens, context)
    if wanted <= most or most >= context:
        return
    works = demand.room.blocks_for(wanted) * demand.room.block
    if prompt >= most:
        raise InvalidRequest(
            "prompt",
            f"the prompt has {prompt} tokens, there is memory for sequences of {most}; "
            f"shorten it to {most - 1} tokens or less, or try kv_tokens {works}",
        )
    raise InvalidRequest(
        "max_tokens",
        f"max_tokens {max_tokens} after {prompt} tokens of prompt do not fit, there is memory for sequences "
        f"of {most}; try {most - prompt}, or kv_tokens {works}",
    )


def leaving(running: Sequence[Request], demand: Demand) -> list[Request]:
    """Who has to leave so that the others can go on, the youngest first. Never the oldest."""
    if len(running) * demand.room.blocks_for(demand.max_model_len) <= demand.room.blocks:
        return []
    needed = sum(map(demand.now, running))
    gone = []
    for request in reversed(running[1:]):
        if needed <= demand.room.blocks:
            break
        needed -= demand.now(request)
        gone.append(request)
    return gone


def joins(request: Request, running: Sequence[Request], seats: int, demand: Demand) -> bool:
    """Whether the request that waits longest can run with the others: at most `seats` in all.

    It joins only where all can grow by a block, or it would be the next to leave again.
    """
    if not running:
        return True
    soon = sum(demand.soon(other) for other in (*running, request))
    return len(running) < seats and soon <= demand.room.blocks


def seated(running: Sequence[Request], demand: Demand) -> set[int]:
    """Sequences that a lane can hold which need not hold all: the oldest, as far as there is room."""
    free = demand.room.blocks
    found = set()
    for request in running:
        if demand.now(request) <= free:
            free -= demand.now(request)
            found.add(request.seq)
    return found
