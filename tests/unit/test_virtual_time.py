"""The scheduler in virtual time, where nothing but the steps of lanes takes any: what it brings is what the
formulas say, and what the controller picks is as good as the best that could have been set.
"""

from __future__ import annotations

from typing import Any

import pytest
from confident import Confident

import workers.speculators.draft
from executor.bench.simulate import Plan, in_virtual_time
from workers.engines.toy import ToyEngine


def simulated(mode: str, batch: int, **changed: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"target_ms": 10, "draft_ms": 1, "acceptance": 0.8, "near": 0.8, "k": 5}
    asked = {"hypotheses": None, "ubatches": None, "new_tokens": 200, "repeat": 1}
    return in_virtual_time(Plan(mode=mode, batch=batch, **{**usual, **asked, **changed}))  # type: ignore[arg-type]


class TestFormula:
    @pytest.mark.parametrize("batch", [1, 2, 8, 32, 256])
    @pytest.mark.parametrize("mode", ["off", "sequential", "ahead", "outcomes"])
    def test_every_mode_brings_what_its_formula_says(self, mode, batch):
        result = simulated(mode, batch, new_tokens=60 if batch > 32 else 200)
        assert result["share"] == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize("acceptance", [0.1, 0.5, 0.95])
    @pytest.mark.parametrize("mode", ["sequential", "ahead", "outcomes"])
    def test_however_often_drafts_are_right(self, mode, acceptance):
        assert simulated(mode, 4, acceptance=acceptance)["share"] == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize("batch", [2, 8, 64])
    def test_two_parts_take_turns(self, batch):
        result = simulated("sequential", batch, ubatches=2, draft_ms=2)
        assert result["share"] == pytest.approx(1.0, abs=0.05)

    @pytest.mark.parametrize("batch", [2, 8, 64])
    def test_nobody_waits_where_parts_and_guessed_verdicts_meet(self, batch):
        assert simulated("outcomes", batch, ubatches=2, draft_ms=2)["share"] == pytest.approx(1.0, abs=0.05)

    def test_without_drafts_a_step_brings_a_token(self):
        assert simulated("off", 3)["tokens_per_step"] == 1.0

    def test_a_run_has_one_outcome(self):
        assert simulated("outcomes", 4) == simulated("outcomes", 4)


FIXED: dict[str, dict[str, Any]] = {
    "off": {"mode": "off"},
    "sequential": {"mode": "sequential"},
    "short": {"mode": "sequential", "k": 2},
    "ahead": {"mode": "ahead"},
    "outcomes": {"mode": "outcomes"},
}


WORLDS: list[dict[str, Any]] = [
    {},
    {"acceptance": 0.3},
    {"acceptance": 0.95},
    {"draft_ms": 2.5},
    {"draft_ms": 5, "acceptance": 0.6},
    {"target_ms": 40, "acceptance": 0.5},
    {"acceptance": 0.02, "near": 0.0},
]
QUICK_AT_EIGHT = ({}, {"acceptance": 0.95}, {"acceptance": 0.02, "near": 0.0})


@pytest.mark.parametrize(
    ("world", "batch"),
    [
        pytest.param(
            *(world, batch),
            id=(",".join(f"{name}={value}" for name, value in world.items()) or "usual") + f"-{batch}",
            marks=pytest.mark.slow if batch > 1 and world not in QUICK_AT_EIGHT else (),
        )
        for world in WORLDS
        for batch in (1, 8)
    ],
)
def test_the_controller_is_within_five_percent_of_the_best_fixed_setting(world, batch):
    best = max(simulated(batch=batch, **(world | how))["tokens_per_step"] for how in FIXED.values())
    assert simulated("auto", batch, new_tokens=800, **world)["tokens_per_step"] >= 0.95 * best


def test_the_controller_goes_on_looking_where_few_rounds_have_all_sequences():
    best = max(simulated(batch=32, **how)["tokens_per_step"] for how in FIXED.values())
    assert simulated("auto", 32, new_tokens=400)["tokens_per_step"] >= 0.95 * best


class Doubtful(Confident):
    of_sequences, of_branches = 0.8, 0.1


def test_prepared_drafts_that_are_worth_too_little_are_made_anew(monkeypatch):
    """Where waiting costs less than they do: then it goes as if nothing were prepared, and no one is lost."""
    usual = simulated("outcomes", 1, draft_ms=0.2)
    monkeypatch.setattr(workers.speculators.draft, "DraftSpeculator", Doubtful)
    doubtful = simulated("outcomes", 1, draft_ms=0.2)
    sequential = simulated("sequential", 1, draft_ms=0.2)
    assert doubtful["acceptance_length"] == usual["acceptance_length"]
    assert doubtful["hit_rate"] < 0.5 * usual["hit_rate"]
    assert 0.97 * sequential["tokens_per_step"] < doubtful["tokens_per_step"] < usual["tokens_per_step"]
    assert simulated("outcomes", 1, draft_ms=2)["hit_rate"] > 0.8  # where waiting is dear


def test_what_a_lane_fails_of_is_raised(monkeypatch):
    def broken(engine, windows):
        raise MemoryError("no room")

    monkeypatch.setattr(ToyEngine, "forward", broken)
    with pytest.raises(MemoryError, match="no room"):
        simulated("sequential", 1)


def test_parts_do_not_matter_without_drafts():
    assert simulated("off", 8, ubatches=2)["share"] == 1.0
