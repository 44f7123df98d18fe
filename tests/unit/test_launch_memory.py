"""What a launch says of memory before it has loaded anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.launch import memory
from executor.launch.plan import make_plan
from executor.launch.topology import parse

SERVER = """
name = "x"
[[speculators]]
name = "pool"
[speculators.options]
target = "{model}"
speculator = "{speculator}"
clients = 3
max_sequences = 2
max_model_len = 100
[[targets]]
name = "main"
attach = [{attach}]
options = {{ target = "{model}", max_sequences = 2, max_model_len = 100, keys = "k" }}
"""
WEIGHTS, KV_BYTES = 134515008 * 2, 23040
HEAD_BYTES = 10244608 + 49152 * 576 * 2
"""The shipped head's file without its header, and the target's embedding."""


def estimates(text: str) -> dict[str, list[memory.Estimate]]:
    found: dict[str, list[memory.Estimate]] = {}
    for each in memory.estimates(make_plan(parse(text), (), Path("/run/x"))):
        found.setdefault(f"{each.process}/{each.lane}", []).append(each)
    return found


def test_a_speculator_that_stands_alone_is_counted_once_with_all_its_clients(smollm2):
    made = estimates(SERVER.format(model=smollm2, speculator=smollm2, attach='"pool"'))
    (pool,), (target,), (attached,) = made["pool/speculator"], made["main/target"], made["main/speculator"]
    assert (pool.weights, pool.kv_bytes_per_token, pool.kv_tokens) == (WEIGHTS, KV_BYTES, 3 * 2 * 100)
    assert (target.weights, target.kv_tokens) == (WEIGHTS, 2 * 100)
    assert (attached.at, attached.unknown, attached.total) == ("ipc:///run/x/pool", "counted for pool", 0)


@pytest.mark.parametrize(
    ("speculator", "weights", "unknown"),
    [("cascade", HEAD_BYTES, ""), ("eagle", HEAD_BYTES, ""), ("suffix", 0, "suffix has no model")],
)
def test_a_head_comes_with_the_embedding_of_its_target(smollm2, speculator, weights, unknown):
    (pool,) = estimates(SERVER.format(model=smollm2, speculator=speculator, attach=""))["pool/speculator"]
    assert (pool.weights, pool.kv_tokens, pool.unknown) == (weights, 0, unknown)


def test_a_server_that_is_not_of_this_launch_says_what_is_not_known(smollm2):
    made = estimates(
        SERVER.format(model=smollm2, speculator="ngram", attach='"ipc:///a", "tcp://10.0.0.7:1"')
    )
    assert [(each.at, each.unknown, each.total) for each in made["main/speculator"]] == [
        ("ipc:///a", "a server of this host that is not of this launch: what it takes is not known here", 0),
        ("tcp://10.0.0.7:1", "nothing of this host, but rows that wait for the way there", 0),
    ]


@pytest.mark.parametrize("speculator", ["cascade", "/nowhere/head.safetensors", "HuggingFaceTB/SmolLM2-360M"])
def test_what_is_not_there_yet_is_said(speculator, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECLANE_CACHE", str(tmp_path))
    text = SERVER.format(model="smollm2-135m", speculator=speculator, attach="")
    (pool,) = estimates(text)["pool/speculator"]
    model = speculator if "360M" in speculator else "smollm2-135m"
    assert (pool.total, pool.unknown) == (0, f"{model} is fetched at the first start")
