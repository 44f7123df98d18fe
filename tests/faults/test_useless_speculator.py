"""Drafts that are never accepted: one alarm, one restart, the same text."""

from __future__ import annotations

import logging

from executor import SamplingParams
from executor.config import Recovery

PARAMS = SamplingParams(max_tokens=60, temperature=0.0)
USELESS = "vocabulary=256,seed=9"


def collapses(caplog) -> list[str]:
    return [r.getMessage() for r in caplog.records if "event=acceptance_collapsed" in r.getMessage()]


def test_a_useless_speculator_is_started_again_once_and_then_left_alone(faults, caplog):
    caplog.set_level(logging.INFO, logger="speclane")
    recovery = Recovery(collapse_rounds=20, collapse_share=0.2)
    with faults.toys(speculator="off") as llm:
        alone = llm.generate(faults.prompt, PARAMS)[0].token_ids
    with faults.toys(speculator=USELESS, recovery=recovery) as llm:
        coordinator = llm.coordinator
        epochs = {coordinator.lanes[1].epoch}
        for _ in range(8):
            assert llm.generate(faults.prompt, PARAMS)[0].token_ids == alone
            faults.wait_for(lambda: coordinator.lanes[1].serving)
            epochs.add(coordinator.lanes[1].epoch)
        assert len(epochs) == 2
        assert coordinator.deaths == {"target": 0, "speculator": 1}
        assert coordinator.health.state == "degraded"
        assert coordinator.health.reason.startswith("acceptance collapsed: 0 of ")
        assert len(collapses(caplog)) == 1

        llm.swap_speculator("vocabulary=256")
        faults.wait_for(lambda: coordinator.health.state == "healthy")
        assert llm.generate(faults.prompt, PARAMS)[0].token_ids == alone
        assert coordinator.deaths["speculator"] == 1


def test_a_lookup_is_not_started_again(faults):
    """Its worth hangs on the text alone."""
    recovery = Recovery(collapse_rounds=1, collapse_share=1.0)
    with faults.toys(speculator="ngram", recovery=recovery) as llm:
        llm.generate([[1, 2, 3] * 20], PARAMS)
        assert sum(llm.coordinator.stats.acceptance.drafted) > 0
        assert llm.coordinator.deaths["speculator"] == 0
        assert llm.coordinator.health.state == "healthy"
