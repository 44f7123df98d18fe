"""The suffix speculator under as many tokens as an hour brings: its memory and the work of a lookup stay."""

from __future__ import annotations

import random
import statistics
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from ipc.messages import LaneSpec, OpenedSequence, SamplingSpec
from workers.sequence import LaneSequence
from workers.speculator import Ask, News
from workers.speculators import lookup
from workers.speculators.history import CONTEXTS, MAX_PLACES
from workers.speculators.suffix import SuffixSpeculator

if TYPE_CHECKING:
    from array import array

SAMPLING = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)
SPEC = LaneSpec("speculator", "suffix", "", "fp32", "cpu", 1, 4, 4096)
WORDS, PHRASES = 20_000, 400
PROMPT, ANSWER, STEP = 32, 480, 16


class Links:
    """A table of links that counts how often one is followed."""

    def __init__(self, table: array[int]) -> None:
        self.table = table
        self.itemsize = table.itemsize
        self.followed = 0

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, place: int) -> int:
        self.followed += 1
        return self.table[place]

    def __setitem__(self, place: int, value: int) -> None:
        self.table[place] = value


class Load:
    """Texts of phrases that come back, some far more often than others, with other words in between."""

    def __init__(self) -> None:
        self._chance = random.Random(0)
        words = range(1, WORDS)
        self._phrases = [self._chance.choices(words, k=self._chance.randint(3, 24)) for _ in range(PHRASES)]
        self._weights = [1 / (rank + 1) for rank in range(PHRASES)]

    def text(self, count: int) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < count:
            (phrase,) = self._chance.choices(self._phrases, self._weights)
            tokens += phrase
            tokens.append(self._chance.randrange(1, WORDS))
        return tokens[:count]


def serve(speculator: SuffixSpeculator, seq: int, text: list[int]) -> list[float]:
    """One sequence from open to close, told STEP tokens at a time. Seconds of each draft."""
    sequence = LaneSequence(OpenedSequence(seq, 0, text[:PROMPT], PROMPT, SAMPLING))
    speculator.open(sequence)
    seconds = []
    for end in range(PROMPT, len(text), STEP):
        sequence.tokens[:] = text[:end]
        began = time.perf_counter()
        speculator.observe([News(sequence)])
        speculator.propose([Ask(sequence, 7)])
        seconds.append(time.perf_counter() - began)
    sequence.tokens[:] = text
    speculator.close(sequence)
    return seconds


def loaded(tokens: int, record: list[str]) -> None:
    """Tell a speculator so many tokens in all; look at it after each twelfth of them."""
    speculator = SuffixSpeculator(SPEC)
    shared = speculator._lookup._shared
    links = [Links(table) for table in shared._before]
    shared._before = links  # type: ignore[assignment]
    load, process = Load(), psutil.Process()
    sequences = tokens // (PROMPT + ANSWER)
    sizes, resident, work = [], [], []
    for part in range(12):
        for link in links:
            link.followed = 0
        seconds: list[float] = []
        for seq in range(part * sequences // 12, (part + 1) * sequences // 12):
            seconds += serve(speculator, seq, load.text(PROMPT + ANSWER))
        # A lookup follows at most two links for each place that it may find, in each table.
        lookups = len(seconds) * 8
        followed = sum(link.followed for link in links)
        assert 0 < followed <= lookups * 2 * MAX_PLACES * len(CONTEXTS)
        work.append(followed / len(seconds))
        sizes.append(speculator._lookup.nbytes)
        resident.append(process.memory_info().rss)
        record.append(
            f"{shared.told:>9} tokens told, {len(shared)} held: {sizes[-1] / 2**20:.1f} MiB, "
            f"resident {resident[-1] / 2**20:.0f} MiB, {work[-1]:.1f} links a draft, "
            f"median {statistics.median(seconds) * 1e6:.0f} µs a draft"
        )
    assert shared.told > tokens * ANSWER / (PROMPT + ANSWER)
    assert len(set(sizes)) == 1
    assert not speculator._lookup._own
    assert not speculator._judge._drafts
    filled = next(part for part in range(12) if (part + 1) * tokens / 12 > 2 * lookup.SHARED_TOKENS)
    assert filled < 6
    assert resident[-1] - resident[filled] < 4 << 20
    assert max(work[filled:]) < 1.1 * min(work[filled:])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_hour_of_a_thousand_tokens_a_second(capsys):
    record: list[str] = []
    loaded(3_600_000, record)
    with capsys.disabled():
        print("", *record, sep="\n")  # noqa: T201 - figures for people
