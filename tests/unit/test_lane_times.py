"""Where the time of lanes goes, by the coordinator's book."""

from __future__ import annotations

from executor.lane_times import LaneTimes


def test_a_bubble_is_what_a_lane_did_not_compute_of_a_round() -> None:
    times = LaneTimes()
    times.answered("target", 0.5, 400)
    times.round_ended(1000, ["target", "speculator"])
    times.round_ended(500, ["target"])
    assert times.bubble_ns == {"target": 600 + 500, "speculator": 1000}
    times.late("speculator", 700)
    times.answered("speculator", 0.5, 100)
    times.round_ended(500, ["target", "speculator"])  # the late one computed before the round, too
    assert times.bubble_ns == {"target": 600 + 500 + 500, "speculator": 1000}
    assert times.busy_ns == {"target": 400, "speculator": 800}


def test_the_wire_is_what_a_lane_did_not_compute_of_an_answer() -> None:
    times = LaneTimes()
    times.answered("target", 0.010_25, 10_000_000)
    times.answered("target", 0.001, 2_000_000)  # two clocks may disagree a little
    times.late("target", 5)
    wire = times.wire["target"]
    assert wire.cumulative()[-1] == 2
    assert dict(zip(wire.bounds, wire.cumulative(), strict=False))[0.0003] == 2
    assert dict(zip(wire.bounds, wire.cumulative(), strict=False))[0.0002] == 1
    assert round(wire.sum, 9) == 0.000_25
