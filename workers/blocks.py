"""Which block of the KV storage holds which positions of which sequence. Pure accounting.

A sequence has a table of blocks, BLOCK positions each. Sequences that hold the same tokens from the start may
share blocks: those they were forked with, and full blocks that are found again by the tokens in them. Nobody
writes to a block that others hold, or that can be found: the writer gets a block of its own. A block that
nobody holds any more can be found until its place is needed, the longest unused going first.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK = 64
"""Positions per block. Attention reads whole blocks, so that is also how far it rounds lengths up."""

_ROOT = 0
"""The name of what precedes a first block."""


def blocks_for(length: int) -> int:
    """How many blocks so many positions take."""
    return -(-length // BLOCK)


class Room(NamedTuple):
    """Blocks that a sequence was given, whose contents are nobody's yet.

    fresh: blocks of new positions. copied: (from, to) where the block from, which others hold, too, has to be
    copied before the sequence writes behind the positions that it shares with them.
    """

    fresh: list[int]
    copied: tuple[int, int] | None


class _Content(NamedTuple):
    """What a full block holds: tokens, after those of the block named `parent`.

    Names are numbers that are never used twice, so equal contents mean equal tokens from the start on.
    """

    parent: int
    tokens: tuple[int, ...]


class _Held:
    """What one sequence holds: `tokens` by position, in the blocks of `table` in order.

    The table may reach further than the tokens: to what `reserve` made room for.
    """

    __slots__ = ("table", "tokens")

    def __init__(self, table: list[int], tokens: list[int]) -> None:
        self.table = table
        self.tokens = tokens


class BlockPool:
    """`blocks` blocks, numbered from 0. All sequences are named by the caller."""

    def __init__(self, blocks: int, *, reuse: bool = True) -> None:
        """`reuse`: whether full blocks can be found again, across sequences."""
        self.blocks = blocks
        self.reused_tokens = 0
        """Positions that sequences were given when they were opened, in total."""
        self._reuse = reuse
        self._held: dict[int, _Held] = {}
        self._holders = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # can be found, held by nobody; oldest first
        self._found: dict[_Content, int] = {}
        self._content: dict[int, _Content] = {}
        self._name: dict[int, int] = {}
        self._names = _ROOT

    # ------------------------------------------------------------ sequences

    def open(self, seq: int, tokens: Sequence[int] = ()) -> int:
        """A new sequence; returns how many leading positions of `tokens` it holds from the start.

        Never all of them: the last has to be run, to see what comes after it.
        Raises ValueError if it is open already.
        """
        if seq in self._held:
            raise ValueError(f"sequence {seq} is open already")
        table: list[int] = []
        parent = _ROOT
        for first in range(0, len(tokens) - BLOCK, BLOCK):
            block = self._found.get(_Content(parent, tuple(tokens[first : first + BLOCK])))
            if block is None:
                break
            table.append(block)
            parent = self._name[block]
        for block in table:
            self._hold(block)
        length = len(table) * BLOCK
        self._held[seq] = _Held(table, list(tokens[:length]))
        self.reused_tokens += length
        return length

    def fork(self, seq: int, other: int) -> None:
        """Open `other`, which holds what `seq` does, in the same blocks. Raises KeyError, ValueError."""
        held = self._of(seq)
        if other in self._held:
            raise ValueError(f"sequence {other} is open already")
        table = held.table[: blocks_for(len(held.tokens))]
        for block in table:
            self._hold(block)
        self._held[other] = _Held(table, list(held.tokens))

    def replace(self, seq: int, other: int) -> None:
        """Let `seq` hold what `other` does, and `other` nothing any more. Raises KeyError."""
        self._of(other)
        self.close(seq)
        self._held[seq] = self._held.pop(other)

    def reserve(self, seq: int, count: int) -> Room:
        """Make sure that `count` more positions can be written; says what has to be done before they are.

        Raises MemoryError, and changes nothing, if there are not blocks enough.
        """
        held = self._of(seq)
        length = len(held.tokens)
        if count == 0:
            return Room([], None)
        last = length // BLOCK
        shared = last < len(held.table) and self._holders[held.table[last]] > 1
        missing = max(0, blocks_for(length + count) - len(held.table))
        if missing + shared > self.available:
            raise MemoryError(
                f"sequence {seq} needs {missing + shared} more blocks of {BLOCK} tokens for its tokens "
                f"{length} to {length + count}, but {self.available} of {self.blocks} are left"
            )
        copied = None
        if shared:
            copied = held.table[last], self._take()
            self._release(held.table[last])
            held.table[last] = copied[1]
        elif last < len(held.table):
            self._forget(held.table[last])
        fresh = [self._take() for _ in range(missing)]
        held.table += fresh
        return Room(fresh, copied)

    def append(self, seq: int, tokens: Sequence[int]) -> None:
        """Count in positions that were written where `reserve` made room. Raises ValueError for more."""
        held = self._of(seq)
        first = len(held.tokens) // BLOCK
        if len(held.tokens) + len(tokens) > len(held.table) * BLOCK:
            raise ValueError(f"sequence {seq} has no room reserved for {len(tokens)} more tokens")
        held.tokens += tokens
        if self._reuse:
            for index in range(first, len(held.tokens) // BLOCK):
                self._publish(held, index)

    def truncate(self, seq: int, length: int) -> None:
        """Keep the first `length` positions, let go of all blocks behind them.

        Raises ValueError if the sequence holds fewer.
        """
        held = self._of(seq)
        if not 0 <= length <= len(held.tokens):
            raise ValueError(
                f"sequence {seq} holds {len(held.tokens)} positions, it cannot be cut to {length}"
            )
        del held.tokens[length:]
        keep = blocks_for(length)
        for block in reversed(held.table[keep:]):
            self._release(block)
        del held.table[keep:]

    def close(self, seq: int) -> None:
        """Let go of all that it holds. Raises KeyError if it is not open."""
        self.truncate(seq, 0)
        del self._held[seq]

    def length(self, seq: int) -> int:
        """Positions held. Raises KeyError if the sequence is not open."""
        return len(self._of(seq).tokens)

    def table(self, seq: int) -> Sequence[int]:
        """Blocks of positions 0 to BLOCK - 1, BLOCK to 2 · BLOCK - 1, … Raises KeyError."""
        return self._of(seq).table

    # ------------------------------------------------------------ blocks

    @property
    def available(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._unused)

    def forget_unused(self) -> None:
        """Nothing that nobody holds can be found any more."""
        for block in list(self._unused):
            self._forget(block)
            self._free.append(block)
        self._unused.clear()

    def _of(self, seq: int) -> _Held:
        try:
            return self._held[seq]
        except KeyError:
            raise KeyError(f"sequence {seq} is not open") from None

    def _take(self) -> int:
        """A block for one holder, whose contents are nobody's. The caller has checked that there is one."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        self._holders[block] += 1
        self._unused.pop(block, None)

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block] == 0:
            if block in self._content:
                self._unused[block] = None
            else:
                self._free.append(block)

    def _publish(self, held: _Held, index: int) -> None:
        """A block is full: it can be found from now on, or gives way to one that holds the same."""
        first = index * BLOCK
        parent = self._name[held.table[index - 1]] if index else _ROOT
        content = _Content(parent, tuple(held.tokens[first : first + BLOCK]))
        block, known = held.table[index], self._found.get(content)
        if known is None:
            self._names += 1
            self._found[content], self._content[block], self._name[block] = block, content, self._names
        elif known != block:
            self._hold(known)
            held.table[index] = known
            self._release(block)

    def _forget(self, block: int) -> None:
        """It cannot be found any more, since it is going to hold something else."""
        content = self._content.pop(block, None)
        if content is not None:
            del self._found[content], self._name[block]
