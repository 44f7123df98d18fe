"""Sampling parameters: every refusal names the field and a value that works."""

from __future__ import annotations

import math
import re

import pytest

from executor.errors import InvalidRequest
from executor.sampling import SamplingParams

REFUSED = [
    ("temperature", -0.1),
    ("temperature", 100.1),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.01),
    ("min_p", 1.5),
    ("min_p", math.nan),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_k", True),
    ("top_k", (1 << 31) + 1),
    ("seed", -1),
    ("seed", 1 << 63),
    ("seed", 0.5),
    ("max_tokens", 0),
    ("max_tokens", -3),
    ("max_tokens", 2.0),
    ("max_tokens", None),
    ("min_tokens", -1),
    ("min_tokens", 129),
    ("logprobs", -1),
    ("logprobs", 21),
    ("logprobs", False),
    ("stop", ("",)),
    ("stop", ""),
    ("stop", ("ok", 3)),
    ("stop_token_ids", (-1,)),
    ("stop_token_ids", ("2",)),
    ("stop_token_ids", (1.0,)),
    ("ignore_eos", "no"),
    ("ignore_eos", None),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=repr)
def test_a_refusal_names_the_field_the_value_and_one_that_works(field, value):
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field
    message = str(refusal.value)
    assert "\n" not in message
    shown = value[-1] if isinstance(value, tuple) else value
    assert repr(shown) in message
    assert re.search(rf"\b{field}\b|stop strings", message)
    assert "try " in message


@pytest.mark.parametrize(("field", "value"), REFUSED, ids=repr)
def test_the_value_offered_does_work(field, value):
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**{field: value})
    offered = str(refusal.value).rpartition("try ")[2]
    offered = offered.split(",")[0].split(" ")[0]
    if field == "stop":
        assert SamplingParams(stop=offered.strip("'"))
    elif field == "ignore_eos":
        assert SamplingParams(ignore_eos=offered == "True").ignore_eos
    elif field == "stop_token_ids":
        assert SamplingParams(stop_token_ids=(int(offered),))
    else:
        assert SamplingParams(**{field: float(offered) if "." in offered else int(offered)})


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0},
        {"temperature": 100.0, "top_p": 1, "top_k": 1 << 31, "min_p": 1},
        {"top_p": 1e-9},
        {"seed": 0},
        {"seed": (1 << 63) - 1},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0},
        {"logprobs": 20},
    ],
    ids=repr,
)
def test_the_bounds_themselves_are_accepted(params):
    SamplingParams(**params)


def test_one_stop_string_may_stand_alone_and_lists_become_tuples():
    assert SamplingParams(stop="x").stop == ("x",)
    assert SamplingParams(stop=["x", "y"], stop_token_ids=[1, 2]).stop_token_ids == (1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"), [("stop", 5), ("stop", b"x"), ("stop_token_ids", 5), ("stop_token_ids", "5")]
)
def test_what_is_no_list_is_refused(field, value):
    with pytest.raises(
        InvalidRequest, match=rf"^{field} must be a list of .*, got {value!r}; try "
    ) as refusal:
        SamplingParams(**{field: value})
    assert refusal.value.field == field


def test_none_is_no_stop():
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()  # type: ignore[arg-type]


def test_min_tokens_are_bounded_by_max_tokens():
    message = r"^min_tokens must be a whole number from 0 to 4 \(max_tokens\), got 9; try 4$"
    with pytest.raises(InvalidRequest, match=message):
        SamplingParams(min_tokens=9, max_tokens=4)


def test_params_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().seed = 3  # type: ignore[misc]
