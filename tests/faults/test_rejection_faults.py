"""Lanes that die while drafts are judged by rejection: no token is lost, none repeated, none judged twice.

The toys' drafts are always awaited, so a text hangs on nothing but what is drafted: it may differ from an
undisturbed one only where a draft was lost.
"""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

RULES = ["rejection", "block"]
DRAFT = "vocabulary=256,agree=0.5"


@pytest.mark.parametrize("acceptance", RULES)
def test_a_round_that_is_judged_again_comes_out_the_same(faults, acceptance):
    """The target dies over a draft. Its successor judges the same one by the same noise."""
    with faults.toys(speculator=DRAFT, acceptance=acceptance) as llm:
        expected = llm.generate(faults.prompt, faults.params)[0]
    with faults.toys(speculator=DRAFT, acceptance=acceptance, target="vocabulary=256,step_ms=5") as llm:
        target = llm.coordinator.lanes[0]
        stream = llm.stream(faults.prompt, faults.params)
        tokens = []
        for delta in stream:
            tokens += delta.token_ids
            if len(tokens) > 20 and target.serving:
                faults.wait_for(lambda: target.in_flight is not None)
                target.process.kill(signal.SIGKILL)
                faults.wait_for(lambda: not target.serving)
        assert tokens == stream.completion.token_ids == expected.token_ids
        assert stream.completion.acceptance == expected.acceptance
        assert llm.coordinator.deaths["target"] == 1


@pytest.mark.parametrize(("acceptance", "victim"), [("rejection", "speculator"), ("block", "target")])
def test_a_determined_text_survives_any_death(faults, acceptance, victim):
    params = replace(faults.params, top_k=1)
    with faults.toys(speculator="off") as llm:
        expected = llm.generate(faults.prompt, params)[0]
    with faults.toys(speculator=f"{DRAFT},step_ms=5", acceptance=acceptance) as llm:
        stream = llm.stream(faults.prompt, params)
        tokens = []
        killed = 0
        for delta in stream:
            tokens += delta.token_ids
            lane = next(lane for lane in llm.coordinator.lanes if lane.name == victim)
            if killed < 2 and len(tokens) > 15 * (killed + 1) and lane.serving:
                lane.process.kill(signal.SIGKILL)
                killed += 1
        assert killed >= 1
        assert tokens == expected.token_ids
        assert stream.completion.text == expected.text


def test_a_dead_speculator_costs_its_draft_and_no_token(faults):
    """Up to its death the text is as undisturbed; then one round is plain."""
    acceptance = "block"
    with faults.toys(speculator=DRAFT, acceptance=acceptance) as llm:
        expected = llm.generate(faults.prompt, faults.params)[0].token_ids
    with faults.toys(speculator=f"{DRAFT},step_ms=10", acceptance=acceptance) as llm:
        speculator = llm.coordinator.lanes[1]
        stream = llm.stream(faults.prompt, faults.params)
        tokens = []
        before = 0
        for delta in stream:
            tokens += delta.token_ids
            if len(tokens) > 20 and not before:
                before = len(tokens)
                faults.wait_for(lambda: speculator.in_flight is not None)
                speculator.process.kill(signal.SIGKILL)
        assert tokens == stream.completion.token_ids
        assert len(tokens) == faults.params.max_tokens
        assert tokens[:before] == expected[:before]
        assert llm.coordinator.stats.missed == 1
