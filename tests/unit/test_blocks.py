"""The block pool against a plain model: a sequence reads what it wrote, whoever shares its blocks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.blocks import BLOCK, BlockPool, Room, blocks_for

BLOCKS = 7


def fill(pool: BlockPool, seq: int, tokens: list[int]) -> Room:
    room = pool.reserve(seq, len(tokens))
    pool.append(seq, tokens)
    return room


def run(pool: BlockPool, seq: int, tokens: list[int]) -> int:
    """Open a sequence and run what it does not hold; returns how much it held from the start."""
    held = pool.open(seq, tokens)
    fill(pool, seq, tokens[held:])
    return held


def test_lengths_round_up_to_whole_blocks():
    assert [blocks_for(length) for length in (0, 1, BLOCK, BLOCK + 1)] == [0, 1, 1, 2]


def test_a_sequence_takes_blocks_as_it_grows():
    pool = BlockPool(4)
    pool.open(1)
    assert fill(pool, 1, [0] * (BLOCK - 1)) == Room([0], None)
    assert fill(pool, 1, [0]) == Room([], None)
    assert fill(pool, 1, [0]) == Room([1], None)
    assert pool.table(1) == [0, 1]
    assert pool.available == 2


def test_a_full_pool_says_how_much_is_missing_and_changes_nothing():
    pool = BlockPool(2)
    pool.open(1)
    fill(pool, 1, [0] * BLOCK)
    with pytest.raises(
        MemoryError, match=r"sequence 1 needs 2 more blocks of 64 tokens .* but 1 of 2 are left"
    ):
        pool.reserve(1, BLOCK + 1)
    assert (pool.table(1), pool.length(1), pool.available) == ([0], BLOCK, 1)


def test_appending_what_was_not_reserved_is_refused():
    pool = BlockPool(2)
    pool.open(1)
    pool.reserve(1, 1)
    with pytest.raises(ValueError, match="sequence 1 has no room reserved for 65 more tokens"):
        pool.append(1, [0] * (BLOCK + 1))
    assert pool.length(1) == 0


def test_a_cut_lets_go_of_the_blocks_behind_it():
    pool = BlockPool(4, reuse=False)
    pool.open(1)
    fill(pool, 1, [0] * (3 * BLOCK))
    pool.truncate(1, BLOCK + 1)
    assert (pool.table(1), pool.available) == ([0, 1], 2)
    with pytest.raises(ValueError, match="sequence 1 holds 65 positions, it cannot be cut to 66"):
        pool.truncate(1, BLOCK + 2)


def test_a_prompt_seen_before_is_not_computed_again():
    pool = BlockPool(8)
    prompt = list(range(2 * BLOCK + 5))
    assert run(pool, 1, prompt) == 0
    assert run(pool, 2, prompt) == 2 * BLOCK
    assert pool.table(2)[:2] == pool.table(1)[:2]
    assert pool.table(2)[2] != pool.table(1)[2]
    assert pool.reused_tokens == 2 * BLOCK


def test_the_last_token_is_always_left_to_run():
    pool = BlockPool(8)
    run(pool, 1, [0] * (2 * BLOCK))
    assert [pool.open(seq, [0] * length) for seq, length in ((2, 2 * BLOCK), (3, 2 * BLOCK + 1))] == [
        BLOCK,
        2 * BLOCK,
    ]


def test_equal_tokens_after_others_are_something_else():
    pool = BlockPool(8)
    run(pool, 1, [1] * BLOCK + [7] * BLOCK)
    run(pool, 2, [2] * BLOCK + [7] * BLOCK)
    assert not set(pool.table(1)) & set(pool.table(2))


def test_blocks_computed_twice_become_one():
    """Two requests with one prompt that run at the same time cannot know of each other before."""
    pool = BlockPool(8)
    prompt = [3] * (BLOCK + 1)
    assert [pool.open(1, prompt), pool.open(2, prompt)] == [0, 0]
    fill(pool, 1, prompt)
    fill(pool, 2, prompt)
    assert pool.table(1)[0] == pool.table(2)[0]
    assert pool.available == 8 - 3


def test_what_was_closed_is_found_until_its_place_is_needed_the_longest_unused_first():
    pool = BlockPool(4)
    for seq, token in ((1, 1), (2, 2)):
        run(pool, seq, [token] * (BLOCK + 1))
        pool.close(seq)
    assert pool.available == 4
    pool.open(3)
    fill(pool, 3, [9] * (3 * BLOCK))  # two were free, so one that could be found has to go
    assert [pool.open(4, [token] * (BLOCK + 1)) for token in (1,)] == [0]
    assert pool.open(5, [2] * (BLOCK + 1)) == BLOCK


def test_the_end_of_a_text_goes_before_its_beginning():
    pool = BlockPool(3)
    run(pool, 1, [1] * (3 * BLOCK))
    pool.close(1)
    pool.open(2)
    fill(pool, 2, [9] * BLOCK)
    assert pool.open(3, [1] * (3 * BLOCK)) == 2 * BLOCK


def test_without_reuse_nothing_is_found():
    pool = BlockPool(4, reuse=False)
    run(pool, 1, [1] * (BLOCK + 1))
    assert pool.open(2, [1] * (BLOCK + 1)) == 0


def test_what_is_to_be_forgotten_is_not_found():
    pool = BlockPool(4)
    run(pool, 1, [1] * (BLOCK + 1))
    pool.close(1)
    pool.forget_unused()
    assert pool.open(2, [1] * (BLOCK + 1)) == 0
    assert pool.available == 4


def test_a_fork_shares_all_and_copies_the_last_block_when_one_of_both_goes_on():
    pool = BlockPool(8)
    pool.open(1)
    fill(pool, 1, [0] * (BLOCK + 1))
    pool.fork(1, 2)
    assert pool.table(1) == pool.table(2) == [0, 1]
    assert fill(pool, 2, [5]) == Room([], (1, 2))
    assert (pool.table(1), pool.table(2)) == ([0, 1], [0, 2])
    assert fill(pool, 1, [6]) == Room([], None)


def test_a_block_that_can_be_found_is_not_found_any_more_once_it_is_written_over():
    pool = BlockPool(8)
    run(pool, 1, [1] * BLOCK)
    pool.truncate(1, BLOCK - 1)
    fill(pool, 1, [2])
    assert pool.open(2, [1] * (BLOCK + 1)) == 0
    assert pool.open(3, [1] * (BLOCK - 1) + [2, 0]) == BLOCK


@pytest.mark.parametrize("call", ["close", "length", "table"])
def test_an_unknown_sequence_is_named(call):
    with pytest.raises(KeyError, match="sequence 7 is not open"):
        getattr(BlockPool(1), call)(7)


def test_a_sequence_is_open_once():
    pool = BlockPool(2)
    pool.open(1)
    for again in (lambda: pool.open(1), lambda: pool.fork(1, 1)):
        with pytest.raises(ValueError, match="sequence 1 is open already"):
            again()


SEQS = st.integers(0, 4)
RUNS = st.lists(st.tuples(st.integers(0, 1), st.integers(1, BLOCK + 10)), min_size=1, max_size=3)


class Pool(RuleBasedStateMachine):
    """Positions are written with all tokens up to them, as keys and values depend on all of these.

    So a read that finds what its own tokens say has not been shared wrongly, written over or left uncopied.
    """

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.storage = [[None] * BLOCK for _ in range(BLOCKS)]
        self.tokens: dict[int, list[int]] = {}

    def some(self, data):
        return data.draw(st.sampled_from(sorted(self.tokens)))

    def write(self, seq, tokens):
        """Reserve, write, count in; or nothing at all if there is no room."""
        before = self.pool.available
        held = self.tokens[seq]
        try:
            fresh, copied = self.pool.reserve(seq, len(tokens))
        except MemoryError:
            needed = blocks_for(len(held) + len(tokens)) - blocks_for(len(held))
            assert needed + 1 > before == self.pool.available
            return
        for block in fresh:
            self.storage[block] = [None] * BLOCK
        if copied:
            self.storage[copied[1]] = list(self.storage[copied[0]])
        for token in tokens:
            held.append(token)
            block, offset = divmod(len(held) - 1, BLOCK)
            self.storage[self.pool.table(seq)[block]][offset] = tuple(held)
        self.pool.append(seq, tokens)

    @rule(seq=SEQS, runs=RUNS)
    def open(self, seq, runs):
        if seq not in self.tokens:
            tokens = [token for token, count in runs for _ in range(count)]
            held = self.pool.open(seq, tokens)
            assert held < len(tokens)
            self.tokens[seq] = tokens[:held]
            self.write(seq, tokens[held:])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), runs=RUNS)
    def append(self, data, runs):
        self.write(self.some(data), [token for token, count in runs for _ in range(count)])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), back=st.integers(1, 3 * BLOCK))
    def truncate(self, data, back):
        seq = self.some(data)
        length = max(0, len(self.tokens[seq]) - back)
        self.pool.truncate(seq, length)
        del self.tokens[seq][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), other=SEQS)
    def fork(self, data, other):
        seq = self.some(data)
        if other not in self.tokens:
            self.pool.fork(seq, other)
            self.tokens[other] = list(self.tokens[seq])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def close(self, data):
        seq = self.some(data)
        self.pool.close(seq)
        del self.tokens[seq]

    @rule()
    def forget_unused(self):
        self.pool.forget_unused()

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        for seq, tokens in self.tokens.items():
            assert self.pool.length(seq) == len(tokens)
            table = self.pool.table(seq)
            for position in range(len(tokens)):
                block, offset = divmod(position, BLOCK)
                assert self.storage[table[block]][offset] == tuple(tokens[: position + 1])

    @invariant()
    def no_block_is_lost_or_given_twice(self):
        tables = {seq: self.pool.table(seq) for seq in self.tokens}
        used = Counter(block for table in tables.values() for block in table)
        assert all(len(set(table)) == len(table) for table in tables.values())
        assert self.pool.available == BLOCKS - len(used)
        shared = {block for block, count in used.items() if count > 1}
        for seq, table in tables.items():
            for index in [index for index, block in enumerate(table) if block in shared]:
                reader = [other for other in tables if table[index] in tables[other]]
                common = min(len(self.tokens[other]) for other in reader)
                ends = [self.tokens[other][: min(common, (index + 1) * BLOCK)] for other in (seq, *reader)]
                assert all(end == ends[0] for end in ends)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=80, stateful_step_count=30, deadline=None, derandomize=True)
