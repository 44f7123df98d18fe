"""The catalogue of messages: complete, distinct, frozen, and alike on both ends."""

from __future__ import annotations

import typing

import msgspec
import pytest

from ipc import codec, messages
from ipc.messages import FAILURE_KINDS, Fact, Message, Order, Record, Stop


def structs(base: type) -> set[type]:
    found = {
        value for value in vars(messages).values() if isinstance(value, type) and issubclass(value, base)
    }
    return found - {base}


def test_every_message_has_exactly_one_direction():
    orders, facts = set(typing.get_args(Order)), set(typing.get_args(Fact))
    assert orders | facts == structs(Message)
    assert not orders & facts
    assert set(codec.ORDERS.values()) == orders
    assert set(codec.FACTS.values()) == facts


def test_orders_are_imperatives_and_facts_past_participles():
    facts = {struct.__name__ for struct in typing.get_args(Fact)}
    assert all(name.endswith("ed") for name in facts - {"Ready"})
    assert not any(struct.__name__.endswith("ed") for struct in typing.get_args(Order))


def test_every_message_begins_with_its_epoch_and_says_what_it_is_for():
    for struct in structs(Message):
        assert msgspec.structs.fields(struct)[0].name == "epoch"
        assert struct.__doc__


def test_messages_and_records_are_frozen():
    assert structs(Record)
    for struct in structs(Message) | structs(Record):
        assert struct.__struct_config__.frozen
        assert struct.__struct_config__.array_like
        assert struct.__struct_config__.forbid_unknown_fields
    with pytest.raises(AttributeError):
        Stop("e").epoch = "f"  # type: ignore[misc]


def test_failure_kinds_have_exit_codes_of_their_own():
    from workers.session import EXIT_CODES

    assert set(EXIT_CODES) == set(FAILURE_KINDS)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert 0 not in EXIT_CODES.values()
