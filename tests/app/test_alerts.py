"""What raises an alert, and what does not."""

from __future__ import annotations

import pytest

from app.alerts import NAMES, Facts, judge
from app.stall import StallWatch

DAY = 86400.0
GIB = 1 << 30


@pytest.mark.parametrize(
    ("facts", "name", "tone"),
    [
        (Facts(state="failed", detail="No memory."), "engine_down", "bad"),
        (Facts(state="restarting"), "engine_down", "bad"),
        (Facts(stalled=130.0), "engine_stalled", "bad"),
        (Facts(pool_share=0.91), "pool_full", "warn"),
        (Facts(pool_share=0.99), "pool_full", "bad"),
        (Facts(preemptions=1), "preemptions", "warn"),
        (Facts(drift=2.5), "budget_drift", "warn"),
        (Facts(disk_free=GIB, disk_total=500 * GIB), "disk_low", "warn"),
        (Facts(disk_free=GIB // 4, disk_total=500 * GIB), "disk_low", "bad"),
        (Facts(disk_free=3 * GIB, disk_total=40 * GIB), "disk_low", "warn"),
        (Facts(backup_age=8 * DAY), "backup_old", "warn"),
        (Facts(backup_age=8 * DAY, backup_exists=False), "backup_old", "warn"),
    ],
)
def test_what_is_wrong_is_told_with_advice(facts: Facts, name: str, tone: str) -> None:
    (alert,) = judge(facts)
    assert (alert.name, alert.tone) == (name, tone)
    assert alert.text.endswith(".")
    assert alert.advice.endswith(".")


@pytest.mark.parametrize(
    "facts",
    [
        Facts(),
        Facts(state="starting"),
        Facts(pool_share=0.9),
        Facts(drift=1.9),
        Facts(disk_free=30 * GIB, disk_total=1000 * GIB),
        Facts(disk_free=5 * GIB, disk_total=40 * GIB),
        Facts(backup_age=6 * DAY),
    ],
)
def test_what_is_well_is_not(facts: Facts) -> None:
    assert judge(facts) == []


def test_what_needs_somebody_now_comes_first() -> None:
    found = judge(Facts(state="failed", preemptions=3, disk_free=0, disk_total=GIB, backup_age=30 * DAY))
    assert [alert.name for alert in found] == ["engine_down", "disk_low", "preemptions", "backup_old"]
    assert {alert.name for alert in found} <= set(NAMES)


def test_work_without_progress_is_a_stall() -> None:
    watch = StallWatch(120.0)
    assert watch.observe(0.0, True, ("a", 1)) == 0.0
    assert watch.observe(50.0, True, ("a", 1)) == 50.0
    assert not watch.stalled(50.0)
    assert watch.observe(61.0, True, ("a", 1)) == 61.0
    assert watch.stalled(61.0)
    assert not watch.lost(120.0), "it ends itself"
    assert watch.lost(144.0)
    assert watch.observe(130.0, True, ("a", 2)) == 0.0, "it goes on"


def test_idleness_is_no_stall_and_none_is_seen_when_it_is_off() -> None:
    watch = StallWatch(60.0)
    for now in (0.0, 100.0, 200.0):
        assert watch.observe(now, False, ()) == 0.0
    assert watch.observe(250.0, True, ()) == 50.0, "since it was last seen idle"
    watch.forget()
    assert watch.observe(300.0, True, ()) == 0.0
    off = StallWatch(0.0)
    assert not off.stalled(1e6)
    assert not off.lost(1e6)
