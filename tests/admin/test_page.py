"""The page's events over HTTP, as the browser sends them, on the real app."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from admin import figures
from admin.live_plot import SCRIPT_NAME
from admin.sampler import Sample
from db.maintenance import memory_samples
from tests.admin.conftest import Bench, Installed
from tests.patience import PATIENCE


class Viewer:
    """An open page: finds an event by a component that it changes and sends it."""

    def __init__(self, http: httpx.AsyncClient, config: dict[str, Any]) -> None:
        self.http = http
        self.parts = {part["props"].get("elem_id"): part["id"] for part in config["components"]}
        self.events = config["dependencies"]

    @classmethod
    async def open(cls, http: httpx.AsyncClient) -> Viewer:
        return cls(http, (await http.get("/admin/config")).json())

    def event(self, *changes: str) -> dict[str, Any]:
        """The first event that changes all of these components."""
        wanted = {self.parts[name] for name in changes}
        return next(event for event in self.events if wanted <= set(event["outputs"]) and not event["queue"])

    def opening(self, tab: str) -> dict[str, Any]:
        """The event of a tab that is opened; it takes the map's view, conversation and tier, and words."""
        part = self.parts[f"tab-{tab}"]
        return next(event for event in self.events if [part, "select"] in event["targets"])

    async def send(self, event: dict[str, Any], *values: Any) -> dict[str, Any]:
        """Send an event; the answer by the components' names."""
        answer = await self.http.post(
            "/admin/gradio_api/run/predict",
            json={"fn_index": event["id"], "data": list(values), "session_hash": "s"},
            headers={"origin": "http://localhost"},
        )
        assert answer.status_code == 200, answer.text
        names = {number: name for name, number in self.parts.items()}
        return {
            names.get(number, number): value
            for number, value in zip(event["outputs"], answer.json()["data"], strict=True)
        }


async def sampled(installed: Installed, after: int = 0) -> Sample:
    async with asyncio.timeout(PATIENCE):
        return await installed.console.sampler.wait_for(
            lambda sample: sample.number > after and sample.snapshot is not None and sample.error is None
        )


async def test_refresh_brings_everything_and_then_only_what_is_new(installed: Installed) -> None:
    await sampled(installed)
    async with installed.client("ann", is_admin=True) as http:
        viewer = await Viewer.open(http)
        event = viewer.event("memory-map", "pool-bar", "sequences", "admin-head")
        first = await viewer.send(event, -1, "memory", figures.BUDGET, "", -1, "")
        drawn = json.loads(first["memory-map"])["data"][0]
        table = installed.fake.budget
        assert drawn["z"] == [[row[head] for row in table] for head in range(3)]
        assert "Engine ready" in first["admin-head"]
        assert "of 20,000 pages" in first["admin-cards"]
        assert "Ring" in first["pool-table"]
        assert first["config"]["__type__"] == "update", "what another tab shows is not sent"
        again = await viewer.send(event, -1, "memory", figures.BUDGET, "", -1, "")
        assert again["memory-map"] == first["memory-map"] or again["memory-map"]["__type__"] == "update"
        over_time = await viewer.send(viewer.event("pool-time"), "memory")
        assert {trace["name"] for trace in json.loads(over_time["pool-time"])["data"]} == {
            "Ring",
            "Sealed, running",
            "Resident",
            "Free",
            "Full cache",
        }


async def test_the_view_is_switched_at_once(installed: Installed) -> None:
    await sampled(installed)
    async with installed.client("ann", is_admin=True) as http:
        viewer = await Viewer.open(http)
        [event] = [event for event in viewer.events if event["outputs"] == [viewer.parts["memory-map"]]]
        shown = json.loads((await viewer.send(event, figures.TIER, "", -1))["memory-map"])["data"][0]
        tiers = installed.fake.geometry.head_tier
        assert shown["z"] == [[row[head] for row in tiers] for head in range(3)]


async def test_the_map_follows_a_conversation(installed: Installed) -> None:
    before = await sampled(installed)
    async with installed.client("ann", is_admin=True) as http:
        viewer = await Viewer.open(http)
        event = viewer.event("memory-map", "pool-bar", "sequences", "admin-head")

        def tokens(shown: dict[str, Any]) -> int:
            return sum(map(sum, json.loads(shown["memory-map"])["data"][0]["z"]))

        start = tokens(await viewer.send(event, -1, "memory", figures.TOKENS, "", -1, ""))
        store, generation = installed.services.store, installed.services.generation
        user = await store.user_by_name("ann")
        assert user is not None
        conversation = await store.create_conversation(user.id)
        sent = await generation.send(user.id, conversation.id, "/tokens 400")
        async for update in generation.subscribe(user.id, sent.reply.id):
            if update.kind == "done":
                break
        installed.console.sampler.poke()
        async with asyncio.timeout(PATIENCE):
            await installed.console.sampler.wait_for(
                lambda sample: (
                    sample.number > before.number + 1
                    and sample.snapshot is not None
                    and any(row.tokens > 400 for row in sample.snapshot.sequences)
                )
            )
        shown = await viewer.send(event, -1, "memory", figures.TOKENS, "", -1, "")
        assert tokens(shown) >= start + 400 * 90 // 2
        assert "resident" in shown["sequences"]


async def test_samples_reach_the_database(installed: Installed) -> None:
    first = await sampled(installed)
    await sampled(installed, after=first.number)
    [row] = await memory_samples(installed.services.database)
    assert row["page_bytes"] == installed.fake.geometry.page_bytes
    assert row["free"] + row["ring"] + row["sealed"] + row["resident"] == 20_000


async def test_the_form_opens_with_what_runs(installed: Installed) -> None:
    await sampled(installed)
    async with installed.client("ann", is_admin=True) as http:
        viewer = await Viewer.open(http)
        event = viewer.event("tune-retention", "tune-group", "tune-alpha")
        assert list((await viewer.send(event)).values()) == [50, 16, 1]


async def test_nothing_on_the_page_is_fetched_from_elsewhere(installed: Installed) -> None:
    async with installed.client("ann", is_admin=True) as http:
        answer = await http.get(f"/admin/{SCRIPT_NAME}")
        assert answer.headers["content-type"].startswith("text/javascript")
        assert answer.headers["content-encoding"] == "gzip"
        assert "immutable" in answer.headers["cache-control"]
        assert "plotly.js v" in answer.text[:200]
        plain = await http.get(f"/admin/{SCRIPT_NAME}", headers={"accept-encoding": "identity"})
        assert "content-encoding" not in plain.headers
        assert plain.text == answer.text
        config = (await http.get("/admin/config")).json()
        for foreign in ("googleapis", "gstatic", "jsdelivr", "unpkg", "cdn.plot.ly"):
            assert foreign not in json.dumps(config)
        assert config["analytics_enabled"] is False


async def test_the_sampler_runs_with_the_app(bench: Bench) -> None:
    async with bench.app.router.lifespan_context(bench.app):
        async with asyncio.timeout(PATIENCE):
            await bench.console.sampler.wait_for(lambda sample: sample.number >= 1)
        names = {task.get_name() for task in asyncio.all_tasks()}
        assert "memory-sampler" in names
    assert "memory-sampler" not in {task.get_name() for task in asyncio.all_tasks()}
