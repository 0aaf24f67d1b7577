"""The last hour, in memory and in the database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from time import time

import pytest

from admin.history import LONGEST_STEP_SECONDS, LONGEST_STORED_STEP_SECONDS, History, PoolPoint
from admin.sampler import INTERVAL_SECONDS, PATIENCE_SECONDS, STORE_SECONDS, UNWATCHED_SECONDS
from admin.snapshot import MemorySnapshot
from admin.storage import PoolStorage
from db import Database
from db.maintenance import add_memory_sample, memory_samples
from tests.admin.support import report

POINT = PoolPoint.of(MemorySnapshot.parse(report(4, 2)))


def at(moment: float) -> PoolPoint:
    return replace(POINT, time=moment)


def test_a_point_takes_what_the_report_says() -> None:
    data = report(4, 2, sequences=5)
    point = PoolPoint.of(MemorySnapshot.parse(data))
    pages = data["pool"]["pages"]
    assert (point.ring, point.sealed, point.resident, point.free) == tuple(
        pages[key] for key in ("ring", "sealed", "resident", "free")
    )
    assert (point.used_bytes, point.full_cache_bytes) == (data["used_bytes"], data["full_cache_bytes"])
    assert (point.sequences, point.takeovers, point.seals) == (5, 5, 12)


def test_only_the_last_hour_is_kept() -> None:
    history = History()
    for moment in range(0, 7200, 2):
        history.add(at(float(moment)))
    assert len(history) == 1801
    assert history.chart(10_000)[0][0].time == 7198 - 3600


def test_a_clock_that_goes_back_does_not_tangle_the_chart() -> None:
    history = History([at(10.0), at(5.0), at(10.0), at(11.0)])
    assert [point.time for point in history.chart()[0]] == [10.0, 11.0]


@pytest.mark.parametrize("count", [1, 239, 240, 241, 1800])
def test_the_chart_is_bounded_ordered_and_ends_with_the_newest(count: int) -> None:
    history = History(at(float(moment)) for moment in range(count))
    [run] = history.chart(240)
    times = [point.time for point in run]
    assert len(times) == min(count, 240)
    assert times == sorted(set(times))
    assert times[-1] == count - 1


def test_missing_samples_start_a_new_run() -> None:
    stored = [at(float(moment)) for moment in (*range(0, 1000, 10), *range(1600, 2000, 10))]
    history = History(stored)
    for moment in (*range(2100, 2700, 2), *range(2720, 3000, 2)):
        history.add(at(float(moment)))
    for limit in (10_000, 100):
        spans = [(run[0].time, run[-1].time) for run in history.chart(limit)]
        assert [start // 100 for start, _ in spans] == [0, 16, 21, 27], limit
        assert [end // 100 for _, end in spans] == [9, 19, 26, 29], limit


def test_a_run_bears_slow_answers_and_the_spacing_of_stored_points() -> None:
    assert LONGEST_STEP_SECONDS >= PATIENCE_SECONDS + INTERVAL_SECONDS
    assert 2 * (STORE_SECONDS + UNWATCHED_SECONDS) <= LONGEST_STORED_STEP_SECONDS


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    database = Database(tmp_path / "chat.sqlite3", tmp_path / "backups")
    database.migrate()
    yield database
    await database.aclose()


async def test_points_come_back_from_the_database(database: Database) -> None:
    storage = PoolStorage(database)
    now = time()
    points = [at(float(int(now) - ago)) for ago in (20, 10, 0)]
    for point in points:
        await storage.add(point)
    assert await storage.last_hour() == points


async def test_old_and_foreign_rows_are_left_out(database: Database) -> None:
    storage = PoolStorage(database)
    await storage.add(at(time() - 4000))
    await add_memory_sample(database, {"note": "by hand"})
    await storage.add(at(float(int(time()))))
    assert len(await storage.last_hour()) == 1
    assert len(await memory_samples(database)) == 3


async def test_nothing_stored_yet(database: Database) -> None:
    assert await PoolStorage(database).last_hour() == []
