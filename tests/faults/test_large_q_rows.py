"""Rows of q in arenas while drafts are prepared, and lanes die: the same text, and every slot comes back."""

from __future__ import annotations

import signal
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from executor import LLM, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ipc.messages import SlotRef

TARGET = "vocabulary=16384"
K = 2
MODES: dict[str, Any] = {
    "ahead": {"mode": "ahead", "hypotheses": 1, "acceptance": "rejection"},
    "outcomes": {"mode": "outcomes", "hypotheses": 2, "acceptance": "block"},
}
PARAMS = SamplingParams(temperature=0.9, top_k=1, max_tokens=20)
"""Drafts are judged by rejection, from a distribution that leaves one token."""


@pytest.fixture(scope="module")
def expected() -> list[int]:
    with LLM(engine="toy", target=TARGET, speculator="off", threads=1) as llm:
        return llm.generate("a prompt", PARAMS)[0].token_ids


@contextmanager
def drafting(faults: Any, mode: str) -> Iterator[tuple[LLM, list[SlotRef]]]:
    """Drafts are right about every other time. Also the slots that were lent, one after the other."""
    options = MODES[mode] | {"q_rows": "full", "num_speculative_tokens": K}
    with faults.toys(target=TARGET, speculator=f"{TARGET},agree=0.5", max_sequences=1, **options) as llm:
        transport = llm.coordinator._lanes.transport
        assert transport.chosen == "memfd"
        lent: list[SlotRef] = []
        lend = transport.leases.lend
        transport.leases.lend = lambda ref, *rest: (lent.append(ref), lend(ref, *rest))
        yield llm, lent


def at_rest(llm: LLM) -> bool:
    """Whether nobody holds a slot of any arena, nor may want one."""
    return not any(llm.coordinator._lanes.transport.leases._arenas.values())


@pytest.mark.parametrize("mode", MODES)
def test_slots_are_used_again_and_again(faults, expected, mode):
    with drafting(faults, mode) as (llm, lent):
        assert llm.generate(faults.prompt, PARAMS)[0].token_ids == expected
        stats = llm.coordinator.stats
        assert stats.hits + stats.misses > 0
        assert (stats.invalid, stats.quarantined) == (0, 0)
        # The arena holds so many; were they not let go, the others would go inline.
        assert len(lent) > (2 + MODES[mode]["hypotheses"]) * K
        faults.wait_for(lambda: at_rest(llm))
        assert "is not read" not in llm.coordinator.lanes[0].process.stderr_tail()


@pytest.mark.parametrize(
    ("mode", "victim"),
    [
        pytest.param("ahead", 0, id="ahead-target"),
        pytest.param("outcomes", 1, id="outcomes-speculator"),
        pytest.param("ahead", 1, id="ahead-speculator", marks=pytest.mark.slow),
        pytest.param("outcomes", 0, id="outcomes-target", marks=pytest.mark.slow),
    ],
)
def test_no_death_costs_a_slot_or_a_token(faults, expected, mode, victim):
    with drafting(faults, mode) as (llm, lent):
        lane = llm.coordinator.lanes[victim]
        tokens: list[int] = []
        for delta in llm.stream(faults.prompt, PARAMS):
            tokens += delta.token_ids
            if len(tokens) > 6 and lane.serving:
                faults.wait_for(lambda: lane.in_flight is not None or not lane.serving)
                lane.process.kill(signal.SIGKILL)
                faults.wait_for(lambda: not lane.serving)
        assert tokens == expected
        assert sum(llm.coordinator.deaths.values()) == 1
        faults.wait_until_healthy(llm)
        target, speculator = llm.coordinator.lanes
        faults.wait_for(lambda: llm.coordinator._lanes.transport.arena_for(speculator, target))
        faults.wait_for(lambda: at_rest(llm))
        before = len(lent)
        assert llm.generate(faults.prompt, replace(PARAMS, max_tokens=8))[0].token_ids == expected[:8]
        assert len(lent) > before
        faults.wait_for(lambda: at_rest(llm))
