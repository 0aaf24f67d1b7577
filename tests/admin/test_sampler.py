"""One sampler for all viewers, through an engine that dies and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from admin.history import PoolPoint
from admin.sampler import STORE_SECONDS, Sampler
from tests.admin.support import Engine, Supervisor
from tests.patience import PATIENCE

QUICK = {"interval": 0.005, "longest_wait": 0.02}


class Store:
    def __init__(self, before: list[PoolPoint] | None = None) -> None:
        self.before = before or []
        self.points: list[PoolPoint] = []
        self.broken = False

    async def add(self, point: PoolPoint) -> None:
        if self.broken:
            raise OSError("disk full")
        self.points.append(point)

    async def last_hour(self) -> list[PoolPoint]:
        if self.broken:
            raise OSError("unreadable")
        return self.before


@pytest.fixture
async def sampler(supervisor: Supervisor) -> AsyncIterator[Sampler]:
    made = Sampler(supervisor.reader, **QUICK)
    yield made
    await made.stop()


async def reach(sampler: Sampler, number: int) -> None:
    async with asyncio.timeout(PATIENCE):
        await sampler.wait_for(lambda sample: sample.number >= number)


async def test_a_sample_holds_report_and_latencies(sampler: Sampler, engine: Engine) -> None:
    assert await sampler.sample()
    sample = sampler.latest
    assert sample.number == 1
    assert sample.error is None
    assert sample.snapshot is not None
    assert sample.snapshot.used_bytes == engine.data["used_bytes"]
    assert sample.ttft == sample.itl == pytest.approx(0.1 + 0.4 * 2 / 6)
    assert len(sampler.history) == 1


async def test_engine_dies_and_comes_back(sampler: Sampler, engine: Engine) -> None:
    sampler.start()
    async with asyncio.timeout(PATIENCE):
        await sampler.wait_for(lambda sample: sample.number >= 3)
        engine.up = False
        away = await sampler.wait_for(lambda sample: sample.error is not None)
        assert away.snapshot is not None, "the last picture stays"
        assert "does not answer" in (away.error or "")
        assert away.ttft is None
        kept = len(sampler.history)
        await sampler.wait_for(lambda sample: sample.number >= away.number + 4)
        assert sampler.wait_seconds == 0.02, "it asks less often, up to the longest wait"
        assert len(sampler.history) == kept
        engine.up = True
        back = await sampler.wait_for(lambda sample: sample.error is None)
        await sampler.wait_for(lambda sample: sample.number > back.number + 1)
    assert sampler.wait_seconds == 0.005
    assert back.number > away.number
    assert len(sampler.history) > kept


async def test_an_engine_that_starts_is_reported_in_words(sampler: Sampler, supervisor: Supervisor) -> None:
    supervisor.gate.clear()
    restart = asyncio.create_task(supervisor.restart({}))
    await asyncio.sleep(0)
    assert not await sampler.sample()
    assert sampler.latest.error == "The engine is starting. Try again in a moment."
    assert sampler.latest.snapshot is None
    assert sampler.wait_seconds == 0.005, "it will be there soon"
    supervisor.gate.set()
    await restart
    assert await sampler.sample()


async def test_a_damaged_report_is_an_error_not_a_crash(sampler: Sampler, engine: Engine) -> None:
    good = engine.data
    engine.data = {**good, "pool": None}
    assert not await sampler.sample()
    assert "pool must be an object" in (sampler.latest.error or "")
    engine.data = good
    assert await sampler.sample()


async def test_an_engine_that_hangs_does_not_hang_the_sampler(
    sampler: Sampler, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(sequence: str | None = None) -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    monkeypatch.setattr(engine, "memory", never)
    monkeypatch.setattr("admin.sampler.PATIENCE_SECONDS", 0.01)
    assert not await sampler.sample()
    assert "no answer within" in (sampler.latest.error or "")


async def test_a_bug_in_one_sample_does_not_end_sampling(
    sampler: Sampler, engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = asyncio.Event()

    async def broken() -> str:
        failing.set()
        raise KeyError("surprise")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "metrics_text", broken)
        sampler.start()
        async with asyncio.timeout(PATIENCE):
            await failing.wait()
    await reach(sampler, 2)
    assert sampler.latest.error is None
    assert "memory sample failed" in caplog.text


async def test_poke_samples_at_once(supervisor: Supervisor) -> None:
    sampler = Sampler(supervisor.reader, interval=3600)
    sampler.start()
    await reach(sampler, 1)
    sampler.poke()
    await reach(sampler, 2)
    await sampler.stop()


async def test_start_twice_is_one_task_and_stop_ends_it(supervisor: Supervisor, engine: Engine) -> None:
    sampler = Sampler(supervisor.reader, interval=3600)
    sampler.start()
    sampler.start()
    await reach(sampler, 1)
    assert engine.memory_calls == 1
    await sampler.stop()
    await sampler.stop()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "memory-sampler"]


async def test_a_point_every_ten_seconds_is_stored(supervisor: Supervisor) -> None:
    store = Store()
    sampler = Sampler(supervisor.reader, store=store)
    every = int(STORE_SECONDS / 2)  # the stand-in's clock goes two seconds a sample
    for _ in range(2 * every + 1):
        await sampler.sample()
    (kept,) = sampler.history.chart()
    stored = [point.time for point in store.points]
    assert stored == [kept[index * every].time for index in range(3)]


async def test_the_chart_starts_with_what_was_stored(supervisor: Supervisor) -> None:
    first = Sampler(supervisor.reader, store=(store := Store()))
    await first.sample()
    second = Sampler(supervisor.reader, store=Store(before=store.points), interval=3600)
    second.start()
    await reach(second, 1)
    await second.stop()
    assert second.history.chart()[0][0].time == store.points[0].time
    assert len(second.history) == 2


async def test_sampling_goes_on_when_storage_fails(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store()
    store.broken = True
    sampler = Sampler(supervisor.reader, store=store, **QUICK)
    sampler.start()
    await reach(sampler, 8)
    await sampler.stop()
    assert sampler.latest.error is None
    assert "not stored" in caplog.text
    assert "not read" in caplog.text
