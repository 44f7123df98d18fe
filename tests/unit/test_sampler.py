"""The tensor sampler obeys the pure rule, token for token; the rule itself is shown on small examples."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from draws import draw
from hypothesis import given, settings
from hypothesis import strategies as st

from workers import noise, sampler
from workers.pure_sampler import kept_tokens, sample_row
from workers.sampler import Sampler

TENTHS = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
SEEDS = st.integers(0, (1 << 63) - 1)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sampled(rows, *draws):
    logits = torch.tensor(rows, dtype=torch.float32)
    return Sampler(logits.shape[1], "cpu").sample(logits, draws)


@settings(max_examples=50, derandomize=True, deadline=None)
@given(SEEDS, st.integers(0, 1 << 40), st.integers(1, 70))
def test_words_are_those_of_the_definition(seed, position, count):
    key = noise.key(seed, position)
    torch_sampler = Sampler(70, "cpu")
    tokens = torch.arange(count, dtype=torch.int32)
    words = [word & 0xFFFFFFFF for word in torch_sampler.words(key, tokens).tolist()]
    assert words == [noise.word(key, token) for token in range(count)]


def test_words_of_a_large_vocabulary_and_of_any_choice_of_tokens():
    key = noise.key(7, 8)
    torch_sampler = Sampler(49152, "cpu")
    words = torch_sampler.words(key, torch.arange(49152, dtype=torch.int32)).tolist()
    assert [word & 0xFFFFFFFF for word in words] == [noise.word(key, token) for token in range(49152)]
    chosen = torch.tensor([49151, 0, 2**31 - 1], dtype=torch.int32)
    assert [word & 0xFFFFFFFF for word in torch_sampler.words(key, chosen).tolist()] == [
        noise.word(key, token) for token in (49151, 0, 2**31 - 1)
    ]


@st.composite
def rows_and_draws(draw_from):
    """Rows with many ties, or none; with and without impossible tokens; around the sampler's inner limits."""
    size = draw_from(st.sampled_from([2, 3, 17, 64, 700]))
    step = draw_from(st.sampled_from([0.0, 0.5, 1e-3]))
    generator = torch.Generator().manual_seed(draw_from(st.integers(0, 1 << 32)))
    row = torch.randn(size, generator=generator) * draw_from(st.sampled_from([0.0, 0.1, 3.0]))
    if step:
        row = (row / step).round() * step
    for token in draw_from(st.lists(st.integers(1, size - 1), max_size=3)):
        row[token] = -math.inf
    fields = {
        "seed": draw_from(SEEDS),
        "temperature": draw_from(st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 1.0, 1.7, 100.0])),
        "top_k": draw_from(st.sampled_from([0, 1, 2, 5, 63, 64, 600, 1 << 31])),
        "top_p": draw_from(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.25, 1e-9])),
        "min_p": draw_from(st.sampled_from([0.0, 0.01, 0.2, 1.0])),
        "min_tokens": draw_from(st.sampled_from([0, 3])),
        "stop_token_ids": draw_from(st.sampled_from([(), (1,), (size - 1, size, 1 << 31)])),
    }
    return row.tolist(), draw(draw_from(st.integers(0, 1 << 31)), draw_from(st.integers(0, 4)), **fields)


@pytest.mark.parametrize("few", [0, sampler.FEW])
@settings(max_examples=300, derandomize=True, deadline=None)
@given(rows_and_draws())
def test_tensors_give_the_tokens_of_the_pure_rule(few, example):
    row, how = example
    with mock.patch.object(sampler, "FEW", few):
        assert sampled([row], how) == [sample_row(row, how)]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(rows_and_draws(), st.integers(0, 20))
def test_log_probabilities_are_those_of_the_pure_rule(example, alternatives):
    row, (sampling, position, generated, _) = example
    fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    how = draw(position, generated, **{**fields, "logprobs": alternatives})
    (found,) = sampled([row], how)
    wanted = sample_row(row, how)
    assert (found.token, [i for i, _ in found.top]) == (wanted.token, [i for i, _ in wanted.top])
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-5)
    assert [p for _, p in found.top] == pytest.approx([p for _, p in wanted.top], abs=1e-5)


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, [1, 3, 2, 0]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [1, 3, 2, 0]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.9}, [1, 3, 2]),
        ({"top_p": 0.91}, [1, 3, 2, 0]),
        ({"min_p": 0.5}, [1, 3, 2]),
        ({"min_p": 0.51}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        # Of the two that top_k leaves the best has 4/7 of the mass.
        ({"top_k": 2, "top_p": 0.57}, [1]),
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"top_k": 3, "min_p": 0.6}, [1, 3]),
        # At temperature 0.5 the probabilities are as 16 : 9 : 4 : 1.
        ({"temperature": 0.5, "top_p": 0.53}, [1]),
        ({"temperature": 0.5, "top_p": 0.54}, [1, 3]),
        ({"temperature": 0.5, "min_p": 0.25}, [1, 3, 2]),
    ],
)
def test_filters_keep_what_they_promise(fields, kept):
    assert kept_tokens(TENTHS, max(TENTHS), draw(**fields).sampling) == kept
    draws = [draw(position, **fields) for position in range(300)]
    assert {sample.token for sample in sampled([TENTHS] * 300, *draws)} == set(kept)


def test_tied_tokens_are_kept_by_lowest_id():
    for fields in ({"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}):
        assert kept_tokens([1.0] * 4, 1.0, draw(**fields).sampling) == [0, 1]
        draws = [draw(position, **fields) for position in range(100)]
        assert {sample.token for sample in sampled([[1.0] * 4] * 100, *draws)} == {0, 1}


def test_greedy_takes_the_lowest_of_tied_tokens():
    rows = [[0.0, 2.0, 2.0, 1.0], [5.0, 5.0, 5.0, 5.0], [0.0, -1.0, 0.0, 3.0]]
    assert [s.token for s in sampled(rows, *[draw(temperature=0.0)] * 3)] == [1, 0, 3]


def test_a_vocabulary_too_flat_for_the_first_candidates_is_filtered_exactly():
    """Half the mass of 4,000 equal tokens is the first 2,000; every second a little lower, the others."""
    draws = [draw(position, top_p=0.5) for position in range(200)]
    flat = torch.zeros(1, 4000).expand(200, -1)
    tokens = [sample.token for sample in Sampler(4000, "cpu").sample(flat, draws)]
    assert max(tokens) < 2000
    assert len(set(tokens)) > 150
    comb = torch.zeros(4000)
    comb[::2] = -0.01
    tokens = [sample.token for sample in Sampler(4000, "cpu").sample(comb.expand(200, -1), draws)]
    assert all(token % 2 for token in tokens)


def test_a_sample_hangs_on_its_own_row_alone():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 3000, generator=generator) * 2
    kinds = [{"temperature": 0.0}, {}, {"top_k": 40, "logprobs": 3}, {"top_p": 0.95, "min_p": 0.01}]
    draws = [draw(position, seed=position % 5, **kinds[position % 4]) for position in range(12)]
    torch_sampler = Sampler(3000, "cpu")
    together = torch_sampler.sample(logits, draws)
    assert together == [torch_sampler.sample(logits[i : i + 1], draws[i : i + 1])[0] for i in range(12)]
    order = [7, 2, 11, 0, 5]
    assert torch_sampler.sample(logits[order], [draws[i] for i in order]) == [together[i] for i in order]
    assert torch_sampler.sample(logits[:0], []) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_read_as_float32(dtype):
    logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(4)).to(dtype)
    draws = [draw(position, logprobs=2) for position in range(4)]
    torch_sampler = Sampler(100, "cpu")
    assert torch_sampler.sample(logits, draws) == torch_sampler.sample(logits.float(), draws)


def test_stop_tokens_wait_for_min_tokens():
    row = [0.0, 9.0, 1.0, -1.0]
    stop = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1, 99)}
    draws = [draw(generated=generated, **stop) for generated in (0, 1, 2)]
    assert [sample.token for sample in sampled([row] * 3, *draws)] == [2, 2, 1]


def test_log_probabilities_come_before_temperature_masks_and_filters():
    row = [*TENTHS, -math.inf]
    fields = {"temperature": 0.1, "top_k": 1, "logprobs": 3, "min_tokens": 1, "stop_token_ids": (1,)}
    (sample,) = sampled([row], draw(**fields))
    assert (sample.token, [i for i, _ in sample.top]) == (3, [1, 3, 2])
    assert sample.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert [p for _, p in sample.top] == pytest.approx([math.log(p) for p in (0.4, 0.3, 0.2)], abs=1e-6)
    (plain,) = sampled([row], draw(temperature=0.0, logprobs=0))
    assert (plain.token, plain.top) == (1, ())
    assert plain.logprob == pytest.approx(math.log(0.4), abs=1e-6)
    (tied,) = sampled([[2.0] * 6], draw(temperature=0.0, logprobs=3))
    assert [i for i, _ in tied.top] == [0, 1, 2]


BAD_ROWS = [
    [0.0, math.nan, 1.0],
    [math.nan] * 3,
    [-math.inf] * 3,
    [0.0, math.inf, 1.0],
]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", BAD_ROWS)
def test_a_row_without_a_token_is_an_error_and_never_a_token(row, temperature):
    good = draw(temperature=temperature)
    with pytest.raises(FloatingPointError, match="row 1: no token can be sampled"):
        sampled([[0.0, 1.0, 2.0], row], good, good)
    with pytest.raises(FloatingPointError, match="no token can be sampled"):
        sample_row(row, good)
    # A mask over the culprit does not make the rest of the row trustworthy.
    masked = draw(temperature=temperature, min_tokens=1, stop_token_ids=(1,))
    with pytest.raises(FloatingPointError):
        sampled([row], masked)
    with pytest.raises(FloatingPointError):
        sample_row(row, masked)


def test_masks_that_leave_no_token_are_an_error():
    nothing = draw(min_tokens=1, stop_token_ids=(0, 1, 2))
    with pytest.raises(FloatingPointError, match="row 0: no token can be sampled"):
        sampled([[0.0, 1.0, 2.0]], nothing)
    with pytest.raises(FloatingPointError, match="no token can be sampled"):
        sample_row([0.0, 1.0, 2.0], nothing)


def test_the_shape_must_fit():
    torch_sampler = Sampler(5, "cpu")
    for shape in ((1, 5), (2, 4), (10,)):
        with pytest.raises(ValueError, match=r"logits must have the shape \(2, 5\), got"):
            torch_sampler.sample(torch.zeros(shape), [draw(), draw()])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_device_gives_the_same_tokens():
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(40, 49152, generator=generator) * 3
    kinds = [{"temperature": 0.0}, {}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05, "logprobs": 5}]
    draws = [draw(position, **kinds[position % 5]) for position in range(40)]
    on_cpu = Sampler(49152, "cpu").sample(logits, draws)
    on_gpu = Sampler(49152, "cuda").sample(logits.cuda(), draws)
    assert [sample.token for sample in on_cpu] == [sample.token for sample in on_gpu]


def test_confidences_are_probabilities_of_single_tokens():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)) * 4
    room = torch.empty(3)
    expected = torch.softmax(logits, 1)[range(3), [7, 0, 49]]
    for out in (None, room):
        found = Sampler(50, "cpu").confidences(logits, [7, 0, 49], out)
        assert found == pytest.approx(expected.tolist(), rel=1e-5)
