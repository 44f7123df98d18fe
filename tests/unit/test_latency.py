"""The histogram of latencies, as Prometheus reads it."""

from __future__ import annotations

import pytest

from executor.server.latency import Distribution


def test_buckets_hold_what_is_below_them_too():
    seen = Distribution("seconds", "Some.", (0.1, 0.5, 1))
    for value, times in ((0.05, 1), (0.1, 2), (0.4, 3), (7.0, 4)):
        seen.observe(value, times)
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for sample in seen.family(("model",), ("m",)).samples
    }
    assert [samples["seconds_bucket", le] for le in ("0.1", "0.5", "1.0", "+Inf")] == [3, 6, 6, 10]
    assert samples["seconds_count", None] == 10
    assert samples["seconds_sum", None] == pytest.approx(0.05 + 0.2 + 1.2 + 28)


def test_no_times_are_no_value():
    seen = Distribution("seconds", "Some.", (1,))
    seen.observe(0.5, 0)
    assert seen.family((), ()).samples[-1].value == 0
