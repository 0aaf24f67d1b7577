"""The figures of a measurement, on turns made by hand."""

import pytest

from benchmarks.clients import Turn
from benchmarks.summary import largest, meets, next_probe, quantiles, summarise


def turn(asked: float, arrivals: list[float], number: int = 0, **fields: object) -> Turn:
    made = Turn(0, number, 100, asked, parts=[(when, 1) for when in arrivals])
    made.ended = arrivals[-1] if arrivals else None
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def test_only_what_arrives_in_the_measured_time_counts() -> None:
    turns = [
        turn(1.0, [2.0, 3.0]),  # before
        turn(8.0, [9.5, 10.5, 11.0]),  # its end is inside
        turn(12.0, [12.5, 13.0], number=1, cached=60, preemptions=2),
        turn(18.0, [19.0, 21.0], cached=20),  # its beginning is inside
    ]
    figures = summarise(turns, 10.0, 20.0)
    assert figures["turns"] == 2
    assert figures["turns_per_second"] == pytest.approx(0.2)
    assert figures["tokens_per_second"] == pytest.approx(0.5)
    assert figures["ttft"]["count"] == 2
    assert figures["ttft"]["p50"] == pytest.approx(0.75)
    assert figures["ttft_by_turn"]["0"]["p50"] == pytest.approx(1.0)
    assert figures["ttft_by_turn"]["1"]["p50"] == pytest.approx(0.5)
    assert figures["itl"]["count"] == 3
    assert figures["itl"]["p50"] == pytest.approx(0.5)
    assert figures["hit_rate"] == pytest.approx(0.4)
    assert figures["preemptions"] == 2
    assert figures["waiting_at_end"] == 0


def test_tokens_that_arrive_together_share_their_time() -> None:
    late = Turn(0, 0, 10, 0.0, parts=[(1.0, 1), (4.0, 3)], ended=4.0)
    figures = summarise([late], 0.0, 10.0)
    assert figures["itl"] == {"p50": 1.0, "p99": 1.0, "count": 3}
    assert figures["merged"] == pytest.approx(0.75)


def test_a_history_that_was_never_sent_is_no_turn_of_the_workload() -> None:
    figures = summarise([turn(1.0, [9.0], joining=True), turn(2.0, [3.0])], 0.0, 10.0)
    assert figures["ttft"]["count"] == 1
    assert figures["ttft"]["p50"] == pytest.approx(1.0)


def test_errors_and_those_who_still_wait_are_told() -> None:
    failed = turn(1.0, [2.0], error="ValueError: no")
    waiting = Turn(0, 0, 10, 3.0)
    cut = Turn(1, 0, 10, 4.0, ended=12.0)  # cut off after the end
    figures = summarise([failed, waiting, cut], 0.0, 10.0)
    assert (figures["errors"], figures["error"]) == (1, "ValueError: no")
    assert figures["turns"] == 0
    assert figures["waiting_at_end"] == 2
    assert figures["longest_wait_at_end"] == pytest.approx(7.0)


def test_nothing_at_all() -> None:
    figures = summarise([], 0.0, 1.0)
    assert figures["ttft"] is None
    assert figures["itl"] is None
    assert figures["hit_rate"] is None
    assert quantiles([]) is None


def point(clients: int, p99: float, **fields: object) -> dict[str, object]:
    usual = {"clients": clients, "ttft": {"p99": p99}, "errors": 0, "longest_wait_at_end": 0.0}
    return usual | fields


def test_a_goal_is_met_by_all_who_ask() -> None:
    assert meets(point(1, 1.0), 1.0)
    assert not meets(point(1, 1.1), 1.0)
    assert not meets(point(1, 0.5, errors=1), 1.0)
    assert not meets(point(1, 0.5, longest_wait_at_end=1.5), 1.0)
    assert not meets(point(1, 0.5, ttft=None), 1.0)


def test_the_largest_number_has_no_failing_one_below_it() -> None:
    assert largest([point(10, 0.5), point(40, 0.7), point(20, 0.6)], 1.0) == 40
    assert largest([point(10, 0.5), point(40, 0.7), point(20, 1.6)], 1.0) == 10
    assert largest([point(10, 2.0)], 1.0) is None


@pytest.mark.parametrize("limit", [9, 10, 11, 17, 40, 99, 137, 199, 200, 500])
def test_a_search_ends_at_the_limit(limit: int) -> None:
    points: list[dict[str, object]] = []
    while (probe := next_probe(points, 10, 200, 1.0)) is not None:
        assert probe not in {p["clients"] for p in points}
        assert 10 <= probe <= 200
        points.append(point(probe, 0.5 if probe <= limit else 2.0))
    assert len(points) <= 9
    found = largest(points, 1.0)
    if limit < 10:
        assert found is None
    else:
        assert found is not None
        assert min(limit, 200) / 1.06 - 1 <= found <= limit


def test_a_search_goes_on_from_what_was_measured() -> None:
    points = [point(20, 0.5), point(60, 3.0)]
    probe = next_probe(points, 10, 200, 1.0)
    assert probe is not None
    assert 20 < probe < 60
