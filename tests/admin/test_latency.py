"""Latencies of the last minutes."""

from __future__ import annotations

import pytest

from admin.latency import ITL, TTFT, LatencyWindow, parse_histograms
from tests.admin.support import prometheus


def test_quantile_is_interpolated_within_its_bucket() -> None:
    histogram = parse_histograms(prometheus({"0.1": 2, "0.5": 8, "+Inf": 8}))[TTFT]
    assert histogram.quantile(0.25) == pytest.approx(0.1)
    assert histogram.quantile(0.5) == pytest.approx(0.1 + 0.4 * 2 / 6)
    assert histogram.quantile(1.0) == pytest.approx(0.5)


def test_label_sets_are_summed_and_other_metrics_left_alone() -> None:
    text = prometheus({"0.1": 1, "+Inf": 1}) + prometheus({"0.1": 3, "+Inf": 4})
    found = parse_histograms(text.replace('engine="0"', 'engine="0",model_name="a,b"'))
    assert set(found) == {TTFT, ITL}
    assert found[TTFT].buckets == ((0.1, 4), (float("inf"), 5))


def test_only_the_window_counts() -> None:
    window = LatencyWindow()
    window.add(prometheus({"0.1": 100, "0.5": 100, "+Inf": 100}))
    assert window.quantile(TTFT, 0.5) == pytest.approx(0.05)
    window.add(prometheus({"0.1": 100, "0.5": 104, "+Inf": 104}))
    assert window.quantile(TTFT, 0.5) == pytest.approx(0.1 + 0.4 / 2)


def test_a_restarted_engine_does_not_give_negative_counts() -> None:
    window = LatencyWindow()
    window.add(prometheus({"0.1": 100, "+Inf": 100}))
    window.add(prometheus({"0.1": 2, "+Inf": 2}))
    assert window.quantile(TTFT, 0.5) == pytest.approx(0.05)


def test_unknown_is_none() -> None:
    window = LatencyWindow()
    assert window.quantile(TTFT, 0.5) is None
    window.add("# TYPE other counter\nother 1.0\n")
    assert window.quantile(TTFT, 0.5) is None
    window.add(prometheus({"+Inf": 3}))
    assert window.quantile(TTFT, 0.5) is None, "an engine that tells no bounds"
