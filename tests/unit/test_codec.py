"""Frames: every message survives the round trip, and nothing else gets in."""

from __future__ import annotations

import math
import pickle
import tracemalloc
import types
import typing
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc import codec
from ipc.errors import MalformedFrame
from ipc.messages import (
    Draft,
    Drafted,
    DraftedItem,
    DraftItem,
    Failed,
    Open,
    OpenedSequence,
    SamplingSpec,
    Stop,
    TokenLogprobs,
    Verified,
    VerifiedItem,
)

PLAIN = settings(max_examples=150, derandomize=True, deadline=None)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """All values of a field's type that the wire can carry: 64-bit integers, UTF-8 text, no NaN (unequal)."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.name: values(field.type) for field in msgspec.structs.fields(kind)}
        return st.builds(kind, **fields)
    arguments = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Literal:
            return st.sampled_from(arguments)
        case types.UnionType:
            return st.one_of([values(argument) for argument in arguments])
        case container if container is list:
            return st.lists(values(arguments[0]), max_size=3)
        case container if container is tuple and arguments[-1] is Ellipsis:
            return st.lists(values(arguments[0]), max_size=3).map(tuple)
        case container if container is tuple:
            return st.tuples(*map(values, arguments))
    return {
        bool: st.booleans(),
        bytes: st.binary(max_size=8),
        int: st.integers(-(2**63), 2**64 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=10),
        type(None): st.none(),
    }[kind]


ORDERS = st.one_of([values(struct) for struct in codec.ORDERS.values()])
FACTS = st.one_of([values(struct) for struct in codec.FACTS.values()])


@PLAIN
@given(ORDERS)
def test_orders_survive_the_round_trip(order):
    assert codec.decode_order(codec.encode(order)) == order


@PLAIN
@given(FACTS)
def test_facts_survive_the_round_trip(fact):
    assert codec.decode_fact(codec.encode(fact)) == fact


@PLAIN
@given(ORDERS, st.data())
def test_no_proper_prefix_of_a_frame_is_a_message(order, data):
    frame = codec.encode(order)
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(MalformedFrame):
        codec.decode_order(frame[:cut])


@PLAIN
@given(FACTS, st.binary(min_size=1, max_size=3))
def test_nothing_may_follow_a_message(fact, trailing):
    with pytest.raises(MalformedFrame):
        codec.decode_fact(codec.encode(fact) + trailing)


@settings(max_examples=500, derandomize=True, deadline=None)
@given(st.binary(max_size=200))
def test_noise_is_refused_or_a_message(noise):
    for decode in (codec.decode_order, codec.decode_fact):
        try:
            message = decode(noise)
        except MalformedFrame:
            continue
        assert decode(codec.encode(message)) == message


@PLAIN
@given(FACTS, st.data())
def test_a_flipped_byte_is_refused_or_another_message(fact, data):
    frame = bytearray(codec.encode(fact))
    place = data.draw(st.integers(0, len(frame) - 1))
    frame[place] ^= data.draw(st.integers(1, 255))
    try:
        codec.decode_fact(bytes(frame))
    except MalformedFrame:
        return


@PLAIN
@given(ORDERS, FACTS)
def test_a_message_is_refused_in_the_other_direction(order, fact):
    with pytest.raises(MalformedFrame):
        codec.decode_fact(codec.encode(order))
    with pytest.raises(MalformedFrame):
        codec.decode_order(codec.encode(fact))


DRAFT_ITEM = [1, 0, 3, [7], 4]


@pytest.mark.parametrize(
    "raw",
    [
        None,
        7,
        "Stop",
        [],
        ["Stop"],
        ["Stop", "e", 1],
        ["Halt", "e"],
        [["Stop"], "e"],
        [0, "e"],
        [None, "e"],
        ["Stop", 1],
        ["Stop", None],
        ["Draft", "e", 1.0, [DRAFT_ITEM]],
        ["Draft", "e", True, [DRAFT_ITEM]],
        ["Draft", "e", "1", [DRAFT_ITEM]],
        ["Draft", "e", 1, [[*DRAFT_ITEM, 0]]],
        ["Draft", "e", 1, [DRAFT_ITEM[:-1]]],
        ["Draft", "e", 1, [[1, 0, 3, [7.5], 4]]],
        ["Draft", "e", 1, [[1, 0, 3, [None], 4]]],
        ["Draft", "e", 1, [[1, 0, 3, 7, 4]]],
        ["Draft", "e", 1, DRAFT_ITEM],
        ["Close", "e", [[1]]],
        ["Close", "e", {}],
        ["Close", "e", {1: 2}],
        {},
        {0: "Stop", 1: "e"},
        {"type": "Stop", "epoch": "e"},
        ["Stop", b""],
        ["Stop", b"e"],
        ["Stop", msgpack.ExtType(5, b"")],
        ["Stop", msgpack.ExtType(5, b"e")],
        ["Stop", msgpack.Timestamp(0)],
        msgpack.ExtType(1, b"Stop"),
    ],
    ids=repr,
)
def test_what_is_no_order_is_refused(raw: Any):
    with pytest.raises(MalformedFrame):
        codec.decode_order(msgpack.packb(raw))


def test_the_messages_that_the_refused_ones_resemble_are_accepted():
    assert codec.decode_order(msgpack.packb(["Stop", "e"])) == Stop("e")
    assert codec.decode_order(msgpack.packb(["Draft", "e", 1, [DRAFT_ITEM]])) == Draft(
        "e", 1, [DraftItem(1, 0, 3, [7], 4)]
    )


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xa4Stop",
        b"\x92\xa4Stop\xa1\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        pickle.dumps(Stop("e")),
        pickle.dumps(["Stop", "e"]),
        b"\x91" * 100_000,
        b"\x81\x01" * 100_000,
        bytes(codec.MAX_FRAME_BYTES + 1),
    ],
    ids=lambda frame: f"{frame[:6]!r}+{len(frame)}",
)
def test_broken_frames_are_refused(frame: bytes):
    with pytest.raises(MalformedFrame):
        codec.decode_order(frame)


def test_caps_on_strings_and_arrays():
    longest = "x" * codec.MAX_STRING_BYTES
    assert codec.decode_order(msgpack.packb(["Stop", longest])) == Stop(longest)
    with pytest.raises(MalformedFrame, match="max_str_len"):
        codec.decode_order(msgpack.packb(["Stop", longest + "x"]))
    most = [0] * codec.MAX_ARRAY_LENGTH
    assert len(codec.decode_order(msgpack.packb(["Close", "e", most])).seqs) == codec.MAX_ARRAY_LENGTH
    with pytest.raises(MalformedFrame, match="max_array_len"):
        codec.decode_order(msgpack.packb(["Close", "e", [*most, 0]]))


def test_a_frame_beyond_the_cap_is_never_made():
    item = DraftedItem(1, 1, 1, [2**40] * codec.MAX_ARRAY_LENGTH)
    with pytest.raises(ValueError, match=r"Drafted of .* exceeds the frame limit"):
        codec.encode(Drafted("e", 1, [item, item], 0))


@pytest.mark.parametrize(("element", "mebibytes"), [(b"\x80", 1), (b"\x90", 24), (b"\xc0", 24)])
def test_a_megabyte_of_empty_values_stays_bounded(element: bytes, mebibytes: int):
    count = 1 << 20
    bomb = b"\xdd" + count.to_bytes(4, "big") + element * count
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame):
            codec.decode_order(bomb)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < mebibytes << 20


def test_odd_floats_pass_unchanged():
    """Log-probabilities may be minus infinity; what a number means is not the codec's business."""
    spec = SamplingSpec(math.nan, -math.inf, 0, math.inf, 0, 0, (), None)
    opened = codec.decode_order(codec.encode(Open("e", [OpenedSequence(0, 0, [1], 1, spec)])))
    sampling = opened.sequences[0].sampling
    assert math.isnan(sampling.temperature)
    assert (sampling.top_p, sampling.min_p) == (-math.inf, math.inf)
    item = VerifiedItem(0, 0, 1, 0, 5, [TokenLogprobs(-math.inf, [(5, -math.inf)])])
    assert codec.decode_fact(codec.encode(Verified("e", 1, [item], 0))).items == [item]


def test_an_integer_is_no_float_but_fits_one():
    """Strict types: 1 is accepted where a float is due, 1.0 is refused where a whole number is."""
    frame = msgpack.packb(["PhaseReached", "e", "load", 1, 2, ""])
    assert codec.decode_fact(frame).seconds == 1.0
    with pytest.raises(MalformedFrame):
        codec.decode_fact(msgpack.packb(["PhaseReached", "e", "load", 1.0, 2.0, ""]))


def test_enumerations_are_closed():
    with pytest.raises(MalformedFrame, match="Invalid enum value 'lunch'"):
        codec.decode_fact(msgpack.packb(["PhaseReached", "e", "lunch", 1.0, 2, ""]))
    with pytest.raises(MalformedFrame):
        codec.decode_fact(msgpack.packb(["Greeted", "e", 1, "referee", 2]))


def test_the_error_says_what_is_wrong():
    with pytest.raises(MalformedFrame, match=r"Expected `array` of at most length 1, got 2"):
        codec.decode_order(msgpack.packb(["Stop", "e", 1]))
    assert codec.decode_fact(codec.encode(Failed("e", "load", "why"))) == Failed("e", "load", "why")
