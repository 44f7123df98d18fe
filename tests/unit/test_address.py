"""Addresses of speculator servers: what is one, who can get there, and what is said of others."""

from __future__ import annotations

import pytest

from executor.address import Address, is_address, parse, parse_several
from executor.config import Config
from executor.errors import InvalidConfig


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("ipc:///run/s", Address("ipc:///run/s", local=True)),
        ("tcp://127.0.0.1:7000", Address("tcp://127.0.0.1:7000", local=True)),
        ("tcp://localhost:7000", Address("tcp://127.0.0.1:7000", local=True)),
        ("tcp://:7000", Address("tcp://127.0.0.1:7000", local=True)),
        ("tcp://[::1]:7000", Address("tcp://[::1]:7000", local=True)),
        ("tcp://10.0.0.7:7000", Address("tcp://10.0.0.7:7000", local=False)),
        ("tcp://0.0.0.0:0", Address("tcp://0.0.0.0:0", local=False)),
        ("tcp://gpu-7.lan:65535", Address("tcp://gpu-7.lan:65535", local=False)),
        ("tcp://127.example.com:1", Address("tcp://127.example.com:1", local=False)),
    ],
)
def test_what_is_an_address(text, address):
    assert is_address(text)
    assert parse(text, "bind") == address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ipc://",
        "ipc://relative",
        "tcp://127.0.0.1",
        "tcp://h:",
        "tcp://h:65536",
        "tcp://a b:1",
        "udp://h:1",
    ],
)
def test_what_is_none(text):
    with pytest.raises(InvalidConfig, match=r"^bind .* is no address; try ipc:///.* or tcp://") as refused:
        parse(text, "bind")
    assert refused.value.field == "bind"


def test_several_are_taken_in_their_order():
    both = parse_several("tcp://127.0.0.1:1, ipc:///s", "speculator")
    assert [each.text for each in both] == ["tcp://127.0.0.1:1", "ipc:///s"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("ipc:///s,", "'' is no address"),
        ("ipc:///s,ipc:///s", "names a server twice"),
        ("tcp://127.0.0.1:0", "has no port; try tcp://127.0.0.1:7000"),
        (",".join(f"ipc:///s{i}" for i in range(9)), "names 9 servers; try at most 8"),
    ],
)
def test_several_that_cannot_be(text, reason):
    with pytest.raises(InvalidConfig, match=reason):
        parse_several(text, "speculator")


def test_another_host_wants_keys():
    with pytest.raises(InvalidConfig, match=r"^keys are needed for tcp://10.0.0.7:7000") as refused:
        Config(engine="toy", speculator="ipc:///s,tcp://10.0.0.7:7000")
    assert refused.value.field == "keys"
    Config(engine="toy", speculator="ipc:///s,tcp://10.0.0.7:7000", keys="k")  # read when it is used


def test_a_model_is_no_address():
    assert not any(map(is_address, ("ngram", "smollm2-135m", "/models/tcp", "org/ipc", "vocabulary=2")))
