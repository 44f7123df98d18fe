"""The suffix speculator: its sources, what it learns between sequences and from its own drafts, its table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from executor import shipped
from ipc.messages import LaneSpec, OpenedSequence, SamplingSpec
from workers.sequence import LaneSequence
from workers.speculator import Ask, News
from workers.speculators import prior as priors
from workers.speculators.calibration import Calibration
from workers.speculators.lookup import Lookup, first_estimate
from workers.speculators.prior import OF, Prior
from workers.speculators.proposals import best
from workers.speculators.suffix import SuffixSpeculator

SAMPLING = SamplingSpec(0.0, 1.0, 0, 0.0, 0, 0, (), None)
SPEC = LaneSpec("speculator", "suffix", "", "fp32", "cpu", 1, 4, 4096)


def opened(seq: int, tokens: list[int], prompt_len: int = 1) -> LaneSequence:
    return LaneSequence(OpenedSequence(seq, 0, tokens, prompt_len, SAMPLING))


def drafts(speculator: SuffixSpeculator, sequence: LaneSequence, k: int) -> list[int]:
    speculator.observe([News(sequence)])
    (draft,) = speculator.propose([Ask(sequence, k)])
    return list(draft)


def test_it_drafts_from_the_sequence_itself():
    speculator = SuffixSpeculator(SPEC)
    sequence = opened(0, [1, 2, 3, 4, 9, 1, 2])
    speculator.open(sequence)
    assert drafts(speculator, sequence, 3) == [3, 4, 9]
    assert drafts(speculator, sequence, 0) == []
    confidences: list[float] = []
    speculator.propose([Ask(sequence, 3, confidences=confidences)])
    assert len(confidences) == 3
    assert all(0 < confidence < 1 for confidence in confidences)
    assert speculator.vocabulary.size == 0
    assert speculator.max_model_len == 4096
    assert speculator.notes == []


def test_what_was_said_in_a_sequence_is_known_to_later_ones_but_its_prompt_is_not():
    speculator = SuffixSpeculator(SPEC)
    first = opened(0, [11, 12, 13, 14, 15, 16, 1, 2, 3, 4, 5], prompt_len=6)
    second = opened(1, [7, 8, 2, 3])
    third = opened(2, [7, 11, 12])
    for sequence in (first, second, third):
        speculator.open(sequence)
    assert drafts(speculator, second, 4) == []
    speculator.close(first)
    assert drafts(speculator, second, 4) == [4, 5]
    assert drafts(speculator, third, 4) == []


def test_drafts_end_where_they_were_mostly_wrong():
    speculator = SuffixSpeculator(SPEC)
    sequence = opened(0, [1, 2, 3, 4, 5, 6, 7, 8])
    speculator.open(sequence)
    lengths = []
    for round_ in range(40):
        sequence.tokens += [1, 2]  # a match of two, each time followed by something new
        lengths.append(len(drafts(speculator, sequence, 7)))
        sequence.tokens.append(100 + round_)
    assert lengths[0] == 7
    assert lengths[-1] == 0


@given(st.lists(st.booleans(), max_size=2000))
def test_expectations_stay_probabilities(outcomes):
    calibration = Calibration(lambda kind: 0.25 if kind == "known" else 0.5)
    assert calibration.expected("known") == 0.25
    for right in outcomes:
        calibration.note("known", right)
        assert 0 < calibration.expected("known") < 1
    assert calibration.expected("other") == 0.5


def test_expectations_follow_what_happens():
    calibration = Calibration(lambda kind: 0.5)
    for _ in range(1000):
        calibration.note("a", True)
        calibration.note("b", False)
    assert calibration.expected("a") > 0.98
    assert calibration.expected("b") < 0.02
    for _ in range(300):
        calibration.note("a", False)
    assert calibration.expected("a") < 0.5


def table(path, contexts: dict[tuple[int, ...], tuple[int, int]]):
    """A file that says for each context what follows it and with what share of OF."""
    rows = sorted(
        (int(priors.keys(np.array([context]))[0]), token, share)
        for context, (token, share) in contexts.items()
    )
    found, tokens, shares = (np.array(column) for column in zip(*rows, strict=True))
    columns = {
        "keys": found.astype(np.uint32),
        "tokens": tokens.astype(np.uint32),
        "shares": shares.astype(np.uint8),
    }
    save_file(columns, path, {"vocabulary": "abc"})
    return Prior(path)


def test_a_table_answers_by_the_longest_context_that_it_knows(tmp_path):
    prior = table(tmp_path / "prior.safetensors", {(5,): (6, 3), (4, 5): (7, 9), (2, 3, 4, 5): (8, 16)})
    assert prior.guess([1, 2, 3, 4, 5]) == (8, 4, 16, OF)
    assert prior.guess([9, 3, 4, 5]) == (7, 2, 9, OF)
    assert prior.guess([5]) == (6, 1, 3, OF)
    assert prior.guess([6]) is None
    assert prior.guess([]) is None
    walk = prior.walk([9, 9, 2, 3])
    assert walk.guess() is None
    walk.go(4)
    walk.go(5)
    assert walk.guess().token == 8
    assert len(prior) == 3


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=4))
def test_contexts_have_the_same_fingerprint_one_by_one_and_in_columns(context):
    made = [int(priors.keys(np.array([context[-n:]]))[0]) for n in range(1, len(context) + 1)]
    assert priors._keys(context) == made


def test_contexts_of_small_numbers_do_not_collide():
    contexts = {context for length in (1, 2, 3) for context in itertools.product(range(9), repeat=length)}
    assert len({priors._keys(context)[-1] for context in contexts}) == len(contexts)


def test_the_sequence_itself_counts_more_than_the_table(tmp_path):
    prior = table(tmp_path / "prior.safetensors", {(2,): (50, 4), (3,): (60, 16)})
    lookup = Lookup(64, prior, Calibration(first_estimate))
    sequence = opened(0, [1, 2, 3, 9, 1, 2])
    lookup.open(sequence)
    path = lookup.path(sequence)
    assert [proposal.token for proposal in path.proposals()] == [3, 50]
    assert best(path.proposals()).token == 3
    path.go(3)
    assert [proposal.token for proposal in path.proposals()] == [9, 60]


@pytest.mark.parametrize("content", [b"", b"no table", b"\x02\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    file = tmp_path / "prior.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"prior\.safetensors"):
        Prior(file)


def test_shipped_tables_are_found_by_vocabulary(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    table(tmp_path / "model" / "prior.safetensors", {(1,): (2, 3)})
    monkeypatch.setattr(shipped, "DIRECTORY", tmp_path)
    assert shipped.prior("abc") == str(tmp_path / "model" / "prior.safetensors")
    assert shipped.prior("other") == ""
    assert shipped.prior("") == ""
