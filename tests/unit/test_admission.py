"""Who runs where memory is short: everybody finishes, nobody overtakes, the lane never lacks a block."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from letters import request

from executor.admission import Demand, KvRoom, joins, leaving, seated
from workers.blocks import BLOCK, BlockPool

if TYPE_CHECKING:
    from executor.request import Request

K = 3


def numbered(seq: int, prompt: int, generated: int = 0, max_tokens: int = 100) -> Request:
    made = request([1] * prompt, [1] * generated, max_tokens=max_tokens)
    made.seq = seq
    return made


def demand(blocks: int, block: int = 4, max_model_len: int = 1000) -> Demand:
    return Demand(KvRoom(blocks * block, block), K, max_model_len)


def test_a_request_needs_room_for_its_tokens_and_drafts():
    assert [demand(9).now(numbered(0, length)) for length in (1, 2, 5, 6)] == [1, 2, 2, 3]
    assert demand(9, max_model_len=6).now(numbered(0, 5)) == 2
    assert demand(9, max_model_len=8).now(numbered(0, 7)) == 2


def test_it_may_need_a_block_more_unless_it_ends_before():
    assert demand(9).soon(numbered(0, 1)) == 2
    assert demand(9).soon(numbered(0, 1, max_tokens=3)) == 1
    assert demand(9, max_model_len=8).soon(numbered(0, 7)) == 2


@pytest.mark.parametrize(("blocks", "gone"), [(8, []), (7, [3]), (5, [3]), (4, [3, 2]), (1, [3, 2])])
def test_the_youngest_leave_and_never_the_oldest(blocks, gone):
    running = [numbered(1, 9), numbered(2, 5), numbered(3, 9)]  # 3, 2 and 3 blocks
    assert [request.seq for request in leaving(running, demand(blocks))] == gone


def test_who_waits_joins_where_all_can_grow():
    running = [numbered(1, 5)]
    assert not joins(numbered(2, 5), running, 8, demand(5))
    assert joins(numbered(2, 5), running, 8, demand(6))
    assert not joins(numbered(2, 5), running, 1, demand(6))


def test_who_is_alone_always_joins():
    assert joins(numbered(2, 5), [], 1, demand(2))


def test_a_speculator_holds_the_oldest_that_it_has_room_for():
    running = [numbered(1, 9), numbered(2, 20), numbered(3, 5)]
    assert seated(running, demand(5)) == {1, 3}
    assert seated(running, demand(11)) == {1, 2, 3}
    assert seated(running, demand(0)) == set()


LENGTHS = st.integers(1, 3 * BLOCK)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    asked=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=12),
    blocks=st.integers(6, 12),
    seats=st.integers(1, 6),
    data=st.data(),
)
def test_all_finish_in_turn_and_the_lane_never_lacks_a_block(asked, blocks, seats, data):
    """A lane of `blocks` blocks follows what is decided; prompts are of few tokens, so some are alike."""
    pool = BlockPool(blocks)
    limits = Demand(KvRoom(blocks * BLOCK, BLOCK), K, 6 * BLOCK)
    waiting = [numbered(seq, prompt, max_tokens=new) for seq, (prompt, new) in enumerate(asked)]
    for made in waiting:
        made.tokens = [made.seq % 2] * made.prompt_len
    running: list[Request] = []
    judged: dict[int, int] = {}  # so many tokens were committed when it was last run; behind them are drafts
    rounds, finished = 0, []
    while waiting or running:
        rounds += 1
        assert rounds < 5000
        for gone in leaving(running, limits):
            assert gone is running[-1] is not running[0]
            running.remove(gone)
            pool.close(gone.seq)
            waiting.insert(0, gone)
        while waiting and joins(waiting[0], running, seats, limits):
            running.append(waiting.pop(0))
            joined = running[-1]
            held = pool.open(joined.seq, joined.tokens)
            pool.reserve(joined.seq, len(joined.tokens) - held)
            pool.append(joined.seq, joined.tokens[held:])
        assert running
        assert len(running) <= seats
        order = [made.seq for made in (*running, *waiting)]
        assert order == sorted(order)
        for made in list(running):
            drafted = min(K, 6 * BLOCK - len(made.tokens))
            pool.truncate(made.seq, min(pool.length(made.seq), judged.get(made.seq, made.prompt_len)))
            judged[made.seq] = len(made.tokens)
            wanted = [*made.tokens, *[5] * drafted][pool.length(made.seq) :]
            pool.reserve(made.seq, len(wanted))
            pool.append(made.seq, wanted)
            gained = data.draw(st.integers(1, drafted + 1))
            made.tokens += [7] * gained
            if made.generated >= made.params.max_tokens or len(made.tokens) >= 6 * BLOCK:
                running.remove(made)
                pool.close(made.seq)
                finished.append(made.seq)
    assert sorted(finished) == [*range(len(asked))]
    assert pool.available == blocks
