"""Alerts on the page and in the metrics, and an engine that hangs."""

from __future__ import annotations

from typing import Any

import pytest

from admin import panels
from admin.watch import Watch
from app.stall import StallWatch
from tests.admin.conftest import Bench
from tests.admin.support import report


def names(watch: Watch) -> list[str]:
    return [alert.name for alert in watch.alerts]


async def test_a_full_pool_raises_an_alert_and_a_metric(bench: Bench) -> None:
    watch, data = bench.console.watch, report(4, 2)
    pages = data["pool"]["pages"]
    await bench.console.sampler.sample()
    assert "pool_full" not in names(watch)
    pages["sealed"] += pages["free"]
    pages["free"] = data["pool"]["free_pages"] = 0
    pages["sealed"] += pages["resident"]
    pages["resident"] = 0
    bench.engine.data = data
    await bench.console.sampler.sample()
    assert "pool_full" in names(watch)
    text = bench.console.services.metrics.text().decode()
    assert 'tangram_chat_alert{name="pool_full"} 1.0' in text
    assert 'tangram_chat_alert{name="disk_low"} 0.0' in text
    shown = panels.alerts_panel(watch.alerts)
    assert 'role="alert"' in shown
    assert "cannot be given up" in shown


async def test_idle_conversations_that_fill_the_pool_are_no_alert_but_pinned_ones_are(bench: Bench) -> None:
    data = report(4, 2)
    pages = data["pool"]["pages"]
    pages["resident"] += pages["free"]
    pages["free"] = data["pool"]["free_pages"] = 0
    bench.engine.data = data
    await bench.console.sampler.sample()
    assert "pool_full" not in names(bench.console.watch)
    (row,) = [row for row in data["sequences"] if row["state"] == "resident"][:1]
    row |= {"pinned": True, "pages": data["pool"]["total_pages"]}
    bench.engine.data = data
    await bench.console.sampler.sample()
    assert "pool_full" in names(bench.console.watch)


async def test_preemptions_and_drift_are_told(bench: Bench) -> None:
    await bench.console.sampler.sample()
    data = report(4, 2, time=bench.engine.data["time"])
    data["counters"]["preemptions"] = 3
    bench.engine.data = data
    bench.engine.metrics += "# TYPE tangram_budget_drift gauge\ntangram_budget_drift 3.25\n"
    await bench.console.sampler.sample()
    found = {alert.name: alert.text for alert in bench.console.watch.alerts}
    assert "3 times" in found["preemptions"]
    assert "3.2" in found["budget_drift"]


async def test_an_engine_that_hangs_is_not_ready_and_then_replaced(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr("admin.watch.time.monotonic", lambda: now[0])
    monkeypatch.setattr(bench.supervisor, "condemn", said.append)
    watch: Any = bench.console.watch
    watch._stall = StallWatch(120.0)
    sampler, engine = bench.console.sampler, bench.engine

    async def at(moment: float) -> None:
        now[0] = moment
        await sampler.sample()

    await at(0.0)
    await at(59.0)
    assert not bench.supervisor.status.stalled
    engine.metrics += "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting 7\n"
    await at(61.0)
    assert bench.supervisor.status.stalled, "others who come to wait are no progress"
    assert names(watch)[0] == "engine_stalled"
    assert said == []
    engine.data = {**engine.data, "counters": {**engine.data["counters"], "seals": 99}}
    await at(70.0)
    assert not bench.supervisor.status.stalled, "it sealed a chunk: it works"
    engine.up = False  # its scheduler does not answer, its health check still does
    await at(131.0)
    assert bench.supervisor.status.stalled is False, "that was the first silence"
    await at(192.0)
    assert bench.supervisor.status.stalled
    await at(276.0)
    await at(277.0)
    assert len(said) == 1
    assert "did nothing for" in said[0]


async def test_disk_and_backups_are_looked_at(bench: Bench) -> None:
    watch = bench.console.watch
    await watch.refresh()
    assert watch.disk is not None
    assert 0 < watch.disk.free <= watch.disk.total
    assert watch.disk.database > 0
    user = await bench.console.services.store.create_user("ann", "hash", True)
    await bench.console.services.backups.make(user.id)
    await watch.refresh()
    assert len(watch.backups) == 1
    assert watch.disk.backups == watch.backups[0].size
    assert bench.console.owners.of_user(user.id) == "ann"
    watch._first_account = 0.0
    watch.backups = []
    await bench.console.sampler.sample()
    assert "backup_old" in names(watch)
