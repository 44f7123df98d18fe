"""Logits that are no numbers, for one request among others: it alone has to do without, or fails."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from executor import RequestFailed, process
from executor.config import Recovery
from executor.restart import RestartPolicy

SEED = 666


@pytest.fixture
def faulty(monkeypatch):
    """`faulty(lane)`: that lane's workers have logits that are no numbers for requests of SEED."""
    real = process.command

    def install(lane: str) -> None:
        def command(its_lane: Any, *rest: Any) -> list[str]:
            whole = real(its_lane, *rest)
            if its_lane != lane:
                return whole
            script = str(Path(__file__).with_name("numerics_worker.py"))
            return [sys.executable, script, str(SEED), *whole[whole.index("--lane") :]]

        monkeypatch.setattr(process, "command", command)

    return install


def test_in_the_speculator_the_request_goes_on_without_drafts(faults, undisturbed, faulty, caplog):
    concerned = replace(faults.params, seed=SEED)
    with faults.toys(speculator="off") as llm:
        alone = llm.generate(faults.prompt, concerned)[0]
    faulty("speculator")
    with faults.toys() as llm:
        speculator = llm.coordinator.lanes[1]
        plain, sound = llm.generate([faults.prompt] * 2, [concerned, faults.params])
        assert (plain.token_ids, plain.acceptance_length) == (alone.token_ids, 1.0)
        assert sound.token_ids == undisturbed.token_ids
        assert sound.acceptance_length > 1.0
        assert llm.coordinator.lanes[1] is speculator
        assert speculator.serving
        stats = llm.coordinator.stats
        assert (stats.missed, stats.invalid, stats.broken, stats.quarantined) == (0, 0, 1, 1)
    quarantines = [line for line in caplog.messages if "sequence_quarantined" in line]
    assert len(quarantines) == 1
    assert "no numbers" in quarantines[0]
    said = [line for line in speculator.stderr_tail.splitlines() if "no token can be sampled" in line]
    assert len(said) == 1


def test_in_the_target_the_request_fails_alone(faults, undisturbed, faulty):
    faulty("target")
    recovery = Recovery(policy=RestartPolicy(intensity=20, backoff=0.01, backoff_max=0.02), strikes=2)
    with faults.toys(recovery=recovery) as llm:
        concerned = llm.stream(faults.prompt, replace(faults.params, seed=SEED))
        others = [llm.stream(faults.prompt, faults.params) for _ in range(2)]
        with pytest.raises(RequestFailed, match="FloatingPointError: row 0: no token can be sampled"):
            list(concerned)
        for other in others:
            list(other)
            assert other.completion.token_ids == undisturbed.token_ids
        assert llm.coordinator.deaths["target"] == 2
