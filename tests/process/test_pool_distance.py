"""A speculator server that is far away: drafts that cost more than they bring are not waited for."""

from __future__ import annotations

import time

import pytest
from pooled import attached, server

from executor import LLM, SamplingParams
from executor.bench.long_wire import LongWire

FAST = "vocabulary=256,step_ms=5"
SECONDS = 60.0


def speed(llm: LLM, seconds: float) -> float:
    """Tokens per second of one stream."""
    tokens, began = 0, 0.0
    for delta in llm.stream("measure", SamplingParams(max_tokens=4000, temperature=0.8, seed=1)):
        now = time.perf_counter()
        tokens += len(delta.token_ids) if began else 0
        began = began or now
        if now - began > seconds:
            break
    return tokens / (now - began)


def port(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_who_waits_too_long_for_drafts_stops_asking_for_them():
    params = SamplingParams(max_tokens=250, temperature=0.8, seed=3)
    with LLM(engine="toy", target=FAST, speculator="off", threads=1) as llm:
        plain = llm.generate("far away", params)[0].token_ids
    with (
        server("tcp://127.0.0.1:0", clients=1) as (address, _),
        LongWire(port(address), seconds=0.2) as wire,
        attached(wire.address, FAST) as llm,
    ):
        assert llm.generate("far away", params)[0].token_ids == plain
        deadline = time.monotonic() + SECONDS
        while llm.coordinator.controller.current.k > 0:
            assert time.monotonic() < deadline
            llm.generate("far away", params)


def test_a_fixed_patience_always_asks():
    from executor import Timeouts

    with server("tcp://127.0.0.1:0", clients=1) as (address, _):
        assert attached(address).config.adapts
        patient = attached(address, timeouts=Timeouts(draft=10.0, draft_least=10.0))
        assert not patient.config.adapts
        assert patient.config.setting.hypotheses == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("step_ms", [5, 25])
@pytest.mark.parametrize("rtt", [0.0, 0.001, 0.005, 0.020])
def test_it_is_never_slower_than_95_percent_of_plain(step_ms, rtt):
    """In turns on one machine, so that what else it does hits both alike; it may not do much."""
    target = f"vocabulary=256,step_ms={step_ms}"
    with (
        server("tcp://127.0.0.1:0", speculator="vocabulary=256,agree=0.8,step_ms=0.5", clients=1) as (
            near,
            _,
        ),
        LongWire(port(near), rtt) as wire,
        LLM(engine="toy", target=target, speculator="off", threads=1) as plain,
        attached(wire.address, target) as far,
    ):
        speed(far, 3.0)
        turns = [(speed(plain, 3.0), speed(far, 3.0)) for _ in range(4)]
    assert sum(its for _, its in turns) >= 0.95 * sum(its for its, _ in turns)
