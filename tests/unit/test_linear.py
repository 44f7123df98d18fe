"""Which row counts are taken for exact: on layers that misbehave in known ways, and on the real ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.linear import (
    EXACT,
    NARROW,
    ONE_BY_ONE,
    ROWS,
    RowBuckets,
    agreeing_rows,
    choose,
    every_count,
    half,
    has_bfloat16,
    narrow,
    packed,
    plain,
    revealing,
)

FEATURES = 4


pytestmark = pytest.mark.usefixtures("one_thread")


def layer(wrong):
    """Doubles its input; `wrong(x)` says by how much each row [rows, 1] is off."""
    return lambda x: x * 2 + wrong(x)


def off_if(condition):
    """Off where the condition holds for the number of rows, and by another amount for each number."""
    return layer(lambda x: float(len(x)) if condition(len(x)) else 0.0)


@pytest.mark.parametrize(
    ("linear", "expected"),
    [
        (off_if(lambda rows: False), ROWS),
        (off_if(lambda rows: rows == 1), ROWS[1:]),
        (off_if(lambda rows: rows > 32), tuple(rows for rows in ROWS if rows <= 32)),
        (off_if(lambda rows: rows % 6 in (1, 2)), (3, 4, 5, 6, 10, 12, 16, 24, 48, 64)),
        # Every count gives other bits: the largest is a class of its own, like all others.
        (layer(lambda x: float(len(x))), (64,)),
        # The place of a row matters wherever there is more than one.
        (layer(lambda x: torch.arange(len(x))[:, None]), (1,)),
        (layer(lambda x: torch.arange(len(x))[:, None] + 1.0 * (len(x) > 1)), (1,)),
    ],
)
def test_the_largest_class_of_agreeing_row_counts_is_found(linear, expected):
    assert agreeing_rows(linear, FEATURES, ROWS) == expected


def test_of_two_equal_classes_the_one_with_more_rows_is_taken():
    assert agreeing_rows(layer(lambda x: float(len(x) < 4)), FEATURES, (1, 2, 4, 8)) == (4, 8)


def test_no_count_agrees_if_even_repeated_calls_differ():
    calls = iter(range(1000))
    assert agreeing_rows(layer(lambda x: float(next(calls))), FEATURES, ROWS) == ()


def sample(outputs):
    return torch.zeros(outputs, FEATURES)


def way(*wrong_by_shape):
    """A way to multiply that is off where the predicate of the weight's number of outputs says."""
    wrong = dict(wrong_by_shape)
    return lambda weight, bias: off_if(wrong.get(weight.shape[0], lambda rows: False))


def broken(weight, bias):
    raise RuntimeError("not on this machine")


def test_buckets_are_those_that_all_shapes_share():
    make = way((8, lambda rows: rows == 1), (16, lambda rows: rows > 4))
    chosen, buckets = choose([sample(8), sample(16), sample(8)], (1, 2, 4, 8), [make])
    assert chosen is make
    assert buckets == RowBuckets((2, 4))


def test_a_way_that_cannot_run_or_does_not_agree_is_passed_over():
    disagreeing = way((8, lambda rows: rows != 8), (16, lambda rows: rows == 8))
    good = way()
    chosen, buckets = choose([sample(8), sample(16)], (2, 4, 8), [broken, disagreeing, good])
    assert (chosen, buckets) == (good, RowBuckets((2, 4, 8)))


def test_a_way_with_large_buckets_only_is_a_last_resort():
    large, small = way((8, lambda rows: rows < 16)), way((8, lambda rows: rows > 4))
    assert choose([sample(8)], ROWS, [large, small])[0] is small
    assert choose([sample(8)], ROWS, [large, broken])[1].sizes[0] == 16


def test_rows_go_one_by_one_if_nothing_agrees():
    def never(weight, bias):
        return layer(lambda x: torch.randn(1).item())

    chosen, buckets = choose([sample(8)], ROWS, [broken, never])
    assert (chosen, buckets) == (never, ONE_BY_ONE)


def test_no_way_at_all_is_an_error():
    with pytest.raises(RuntimeError, match="no way of multiplying"):
        choose([sample(8)], ROWS, [broken])


def test_the_smallest_bucket_that_fits_is_taken():
    buckets = RowBuckets((3, 4, 8))
    assert [buckets.fit(rows) for rows in (1, 3, 4, 5, 8)] == [3, 3, 4, 8, 8]
    assert buckets.largest == 8
    with pytest.raises(ValueError, match="9 rows exceed the largest bucket, 8"):
        buckets.fit(9)
    assert every_count(5).sizes == (1, 2, 3, 4, 5)


def weights(outputs, features, dtype, scale=0.05):
    generator = torch.Generator().manual_seed(outputs + features)
    return (torch.randn(outputs, features, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("make", [half, packed, plain])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_way_is_the_float32_product_of_the_16_bit_weights(make, dtype, with_bias):
    weight = weights(96, 64, dtype)
    bias = weights(1, 96, dtype)[0] if with_bias else None
    x = weights(5, 64, torch.float32, 1.0)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    y = make(weight, bias)(x)
    assert y.dtype == torch.float32
    assert (y - exact).abs().max() < 1e-6


def test_small_bfloat16_weights_are_not_lost_in_half_precision():
    weight = weights(32, 32, torch.bfloat16, 1e-6)
    x = weights(4, 32, torch.float32, 1.0)
    exact = x.double() @ weight.double().T
    assert ((half(weight, None)(x) - exact).abs().max() / exact.abs().max()) < 1e-6


def test_float32_weights_are_not_squeezed_into_16_bits():
    with pytest.raises(RuntimeError, match="do not fit"):
        half(weights(8, 8, torch.float32), None)


needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="a CPU without bfloat16 arithmetic")


@needs_bfloat16
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("given_in", [torch.float32, torch.bfloat16])
def test_bfloat16_rounds_input_and_result_and_nothing_else(with_bias, given_in):
    weight = weights(96, 64, torch.bfloat16)
    bias = weights(1, 96, torch.bfloat16)[0] if with_bias else None
    x = weights(5, 64, torch.float32, 1.0)
    exact = x.bfloat16().double() @ weight.double().T + (0 if bias is None else bias.double())
    y = narrow(weight, bias)(x.to(given_in))
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()


@needs_bfloat16
def test_bfloat16_arithmetic_is_taken_where_it_may_be():
    weight = weights(192, 576, torch.bfloat16)
    assert choose([weight], ROWS, NARROW)[0] is narrow
    assert choose([weight], ROWS)[0] is not narrow
    assert choose([weights(192, 576, torch.float16)], ROWS, NARROW)[0] is not narrow


def test_bfloat16_arithmetic_is_not_emulated(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_f": True, "avx512_bf16": False})
    with pytest.raises(RuntimeError, match="no bfloat16 arithmetic"):
        narrow(weights(8, 8, torch.bfloat16), None)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert has_bfloat16()


@pytest.mark.parametrize("features", [576, 97])
def test_another_order_of_summation_shows_through_rounding_to_bfloat16(features):
    """Ordinary inputs hide it: there, next to no result differs."""
    weight, x = revealing(64, features, 16, torch.bfloat16)
    exact, size = weight.double() @ x.double().T, weight.double().abs() @ x.double().abs().T
    assert (exact.abs() < size * 1e-13).all()

    def results(weight, x, order):
        terms = weight[:, None, order].float() * x[None, :, order]
        total = torch.zeros(terms.shape[:2])
        for term in terms.unbind(2):
            total += term
        return total.bfloat16()

    orders = torch.arange(features), torch.arange(features).flip(0)
    one, other = (results(weight, x, order) for order in orders)
    assert (one != other).float().mean() > 0.9
    plain_x = torch.randn(16, features, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    one, other = (results(weights(64, features, torch.bfloat16), plain_x, order) for order in orders)
    assert (one != other).float().mean() < 0.05


@pytest.mark.parametrize(
    ("dtype", "ways"), [(torch.bfloat16, NARROW), (torch.bfloat16, EXACT), (torch.float32, EXACT)]
)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_on_this_machine_the_chosen_buckets_are_exact(dtype, ways, data):
    weight = weights(192, 576, dtype)
    make, buckets = choose([weight], ROWS, ways)
    linear = make(weight, None)
    x = weights(buckets.largest, 576, torch.float32, 1.0)
    rows = data.draw(st.sampled_from(buckets.sizes))
    first = data.draw(st.integers(0, buckets.largest - rows))
    assert torch.equal(linear(x[first : first + rows]), linear(x)[first : first + rows])
