"""The noise is pinned, uniform, and unrelated between neighbouring tokens, positions and seeds."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import pytest
from scipy import stats

from workers import noise

SMALLEST_P = 1e-3


def test_words_are_pinned():
    """Changing one of these changes the text of every seeded request."""
    words = [noise.word(noise.key(seed, position), token) for seed, position, token in PINNED]
    assert words == list(PINNED.values())


def test_a_word_is_the_finaliser_of_an_odd_multiple():
    assert noise.word(noise.Key(1, 0), 0) == 0
    assert noise.word(noise.Key(3, 5), 7) == noise.word(noise.Key(1, 0), 26)
    assert noise.word(noise.Key(0xFFFFFFFF, 1), 1) == noise.word(noise.Key(1, 0), 0)


def test_keys_differ_by_seed_position_and_purpose():
    keys = {noise.key(1, 2, 0), noise.key(2, 1, 0), noise.key(1, 2, 1), noise.key(1, 2 + (1 << 32), 0)}
    assert len(keys) == 4
    assert noise.key(-1, 2) == noise.key((1 << 64) - 1, 2)
    assert all(key.multiplier % 2 == 1 for key in keys)


def test_no_two_tokens_of_a_row_share_a_word():
    row = noise.key(5, 6)
    assert len({noise.word(row, token) for token in range(1 << 16)}) == 1 << 16


def test_the_extremes_are_finite():
    assert noise.uniform(noise.Key(1, 0), 0) == 2.0**-33
    assert noise.gumbel(noise.Key(1, 0), 0) == pytest.approx(33 * math.log(2))
    largest = noise.Key(1, _argument_of(0xFFFFFFFF))
    assert noise.word(largest, 0) == 0xFFFFFFFF
    assert noise.uniform(largest, 0) == 1.0 - 2.0**-24
    assert noise.gumbel(largest, 0) == pytest.approx(-math.log(24 * math.log(2)))


def test_a_toy_worker_needs_no_torch():
    code = (
        "import sys, workers.noise, workers.pure_sampler, workers.acceptance, workers.engines.toy\n"
        "sys.exit(' '.join({'torch', 'numpy', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def _along_tokens(i):
    return noise.uniform(FIXED_ROW, i)


def _along_positions(i):
    return noise.uniform(noise.key(42, i), 17)


def _along_seeds(i):
    return noise.uniform(noise.key(i, 17), 42)


FIXED_ROW = noise.key(42, 17)
AXES = [_along_tokens, _along_positions, _along_seeds]


@pytest.mark.parametrize("axis", AXES)
def test_uniform(axis):
    counts = Counter(int(axis(i) * 256) for i in range(1 << 15))
    assert SMALLEST_P < stats.chisquare([counts[b] for b in range(256)]).pvalue < 1 - SMALLEST_P


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("distance", [1, 2])
def test_neighbours_are_independent(axis, distance):
    values = [int(axis(i) * 16) for i in range(1 << 14)]
    pairs = Counter(zip(values, values[distance:], strict=False))
    counts = [pairs[a, b] for a in range(16) for b in range(16)]
    assert SMALLEST_P < stats.chisquare(counts).pvalue < 1 - SMALLEST_P


def test_the_extreme_tail_is_uniform_too():
    """Winners of large vocabularies have a tiny v: 16 bins below 1/256, over rows."""
    rows = [noise.key(seed, position) for seed in range(16) for position in range(16)]
    tail = [v for row in rows for token in range(512) if (v := noise.uniform(row, token)) < 1 / 256]
    counts = Counter(int(v * 4096) for v in tail)
    assert SMALLEST_P < stats.chisquare([counts[b] for b in range(16)]).pvalue < 1 - SMALLEST_P


def _argument_of(word):
    """The number that the finaliser turns into `word`: each of its steps undone, last first."""
    x = word ^ word >> 16
    x = x * pow(noise.MULTIPLIER_2, -1, 1 << 32) & 0xFFFFFFFF
    x ^= x >> 15 ^ x >> 30
    x = x * pow(noise.MULTIPLIER_1, -1, 1 << 32) & 0xFFFFFFFF
    return x ^ x >> 16


PINNED = {
    (0, 0, 0): 0xC7F39805,
    (0, 0, 1): 0x8425ECEE,
    (0, 1, 0): 0x5F0DD453,
    (1, 0, 0): 0x0F880AF6,
    (42, 1000, 49151): 0x5F9CD413,
    (0x7FFFFFFFFFFFFFFF, 1048576, 2147483647): 0xE4FD2C24,
}
