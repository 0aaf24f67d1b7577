"""An engine that has work and computes nothing ends itself; no other does."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from tangram.errors import ConfigError, EngineUnavailable
from tangram.stall import EXIT_STALLED, StallClock, allowed_seconds, progress, watch
from tangram.telemetry import CacheSnapshot, Sequence
from tests.patience import PATIENCE
from tests.tree import ROOT


def snapshot(tokens: int = 10, running: int = 1, waiting: int = 0, **counters: int) -> CacheSnapshot:
    row = Sequence("a", "running", tokens, 0, 1, None)
    return CacheSnapshot(10, 9, [row] * running, counters, {}, running, waiting)


def clock(*looks: CacheSnapshot | None) -> Iterator[float]:
    """What it says at each look, ten seconds apart; None does not answer."""
    time, at = [0.0], iter(looks)

    def look() -> CacheSnapshot:
        found = next(at)
        if found is None:
            raise EngineUnavailable("silent")
        return found

    watching = StallClock(look, lambda: time[0])
    for _ in looks:
        time[0] += 10
        yield watching.stalled()


def test_only_work_without_progress_counts() -> None:
    assert list(clock(snapshot(1), snapshot(2), snapshot(3))) == [0, 0, 0]
    assert list(clock(snapshot(1), snapshot(1), snapshot(1), snapshot(2))) == [0, 10, 20, 0]
    assert list(clock(*[snapshot(running=0)] * 3)) == [0, 0, 0]
    waits = snapshot(running=0, waiting=1)
    assert list(clock(waits, waits, waits)) == [0, 10, 20]
    assert list(clock(snapshot(seals=1), snapshot(seals=2))) == [0, 0]


def test_a_scheduler_that_does_not_answer_makes_no_progress() -> None:
    assert list(clock(snapshot(1), None, None)) == [0, 10, 20]
    assert list(clock(snapshot(running=0), None, None)) == [0, 0, 10]
    assert list(clock(None, snapshot(1), snapshot(running=0))) == [0, 0, 0]


def test_a_scheduler_that_never_answered_is_not_given_up() -> None:
    """So no process ends that only has the routes, without an engine."""
    assert list(clock(None, None, None)) == [0, 0, 0]
    assert list(clock(None, None, snapshot(1), None)) == [0, 0, 0, 10]


def test_idle_rows_are_no_work() -> None:
    idle = Sequence("a", "resident", 10, 0, 1, 5.0)
    assert progress(CacheSnapshot(10, 9, [idle], {})) is None


def test_the_watch_ends_the_process_once() -> None:
    ended = threading.Event()
    thread = watch([lambda: snapshot(1)], 0.2, ended.set)
    assert thread is not None
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)
    assert watch([lambda: snapshot(1)], 0.0, ended.clear) is None


def test_one_engine_that_gets_nowhere_is_enough() -> None:
    ended, tokens = threading.Event(), itertools.count()
    thread = watch([lambda: snapshot(next(tokens)), lambda: snapshot(1)], 0.2, ended.set)
    assert thread is not None
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)


def test_engines_that_get_on_are_left_alone() -> None:
    ended, tokens, enough = threading.Event(), itertools.count(), threading.Event()
    ended_before: list[bool] = []

    def look() -> CacheSnapshot:
        if (seen := next(tokens)) > 40:  # for four times as long as it may stand still
            ended_before.append(ended.is_set())
            enough.set()
            return snapshot(40)
        return snapshot(seen)

    thread = watch([look, lambda: snapshot(running=0)], 0.1, ended.set)
    assert thread is not None
    assert enough.wait(PATIENCE)
    assert not ended_before[0]
    assert ended.wait(PATIENCE)
    thread.join(PATIENCE)


def test_the_end_is_a_status_of_its_own() -> None:
    code = "from tangram.stall import end_process; import time; end_process(); time.sleep(60)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=4 * PATIENCE)
    assert done.returncode == EXIT_STALLED


@pytest.mark.parametrize(("text", "seconds"), [("", 300.0), ("0", 0.0), ("12.5", 12.5)])
def test_the_seconds_come_from_the_environment(text: str, seconds: float) -> None:
    assert allowed_seconds({"TANGRAM_STALL_SECONDS": text}) == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_wrong_seconds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="TANGRAM_STALL_SECONDS"):
        allowed_seconds({"TANGRAM_STALL_SECONDS": text})
