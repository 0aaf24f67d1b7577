"""Rates from counters that only grow, until the engine is replaced."""

from __future__ import annotations

import json

import pytest

from admin.charts import PLOTS, engine_plot
from admin.latency import ITL, LatencyWindow
from admin.series import COUNTED, EnginePoint, EngineSeries, parse_values
from tests.admin.support import prometheus


def point(
    time: float, generated: float = 0, preemptions: float = 0, ttft: float | None = None
) -> EnginePoint:
    counts = dict.fromkeys(COUNTED, 0.0) | {"generated": generated, "preemptions": preemptions}
    return EnginePoint(time, 1, 2, counts, ttft=ttft)


def test_values_are_summed_over_their_labels_and_others_are_left() -> None:
    page = (
        "# TYPE vllm:generation_tokens counter\n"
        'vllm:generation_tokens_total{engine="0"} 5.0\nvllm:generation_tokens_total{engine="1"} 7.0\n'
        "vllm:generation_tokens_total_extra 9\n"
        'vllm:num_requests_waiting{a="b c"} 3\ntangram_budget_drift 2.5\n'
    )
    assert parse_values(page) == {
        "vllm:generation_tokens_total": 12.0,
        "vllm:num_requests_waiting": 3.0,
        "tangram_budget_drift": 2.5,
    }


def test_rates_are_over_some_seconds() -> None:
    series = EngineSeries()
    for second in range(30):
        series.add(point(100.0 + second, generated=40.0 * second))
    latest = series.latest()
    assert latest is not None
    assert latest.rates["generated"] == pytest.approx(40.0)


def test_a_new_engine_starts_over() -> None:
    series = EngineSeries()
    series.add(point(0.0, generated=1000, preemptions=4))
    series.add(point(1.0, generated=1100, preemptions=6))
    series.add(point(2.0, generated=30, preemptions=1))
    latest = series.latest()
    assert latest is not None
    assert latest.rates["generated"] == 15.0, "what the new one wrote, since the first point"
    assert series.grown("preemptions", 600) == 3
    assert series.grown("preemptions", 1) == 1


def test_only_the_last_minutes_are_kept_and_few_points_drawn() -> None:
    series = EngineSeries(kept=60)
    for second in range(200):
        series.add(point(float(second)))
    series.add(point(50.0))
    assert len(series) == 61
    times = [at.point.time for at in series.chart(20)]
    assert len(times) == 20
    assert times == sorted(times)
    assert times[-1] == 199.0


@pytest.mark.parametrize("plot", PLOTS, ids=lambda plot: plot.name)
def test_every_plot_draws_what_there_is(plot: object) -> None:
    series = EngineSeries()
    for second in range(5):
        series.add(point(float(second), generated=10.0 * second, ttft=0.2 if second != 2 else None))
    figure = json.loads(engine_plot(plot, series.chart(10)).to_json())  # type: ignore[arg-type]
    assert all(len(trace["x"]) == 5 for trace in figure["data"])
    assert figure["data"][0]["x"][-1] == 0
    empty = json.loads(engine_plot(plot, []).to_json())  # type: ignore[arg-type]
    assert all(trace["x"] == [] for trace in empty["data"])


def test_a_latency_that_was_not_observed_is_a_gap() -> None:
    series = EngineSeries()
    for second, seconds in enumerate((0.2, None, 0.1)):
        series.add(point(float(second), ttft=seconds))
    drawn = json.loads(engine_plot(PLOTS[0], series.chart(10)).to_json())["data"][0]["y"]
    assert drawn == [200.0, None, 100.0]


def test_lately_is_what_was_observed_lately() -> None:
    window = LatencyWindow()
    window.add(prometheus({"0.1": 10, "0.5": 10, "+Inf": 10}))
    assert window.lately(ITL, 0.5, 60) is None, "one reading has no before"
    window.add(prometheus({"0.1": 10, "0.5": 10, "+Inf": 10}))
    assert window.lately(ITL, 0.5, 60) is None, "nothing came since"
    assert window.quantile(ITL, 0.5) is not None
    window.add(prometheus({"0.1": 10, "0.5": 14, "+Inf": 14}))
    assert window.lately(ITL, 0.5, 60) == pytest.approx(0.3)
