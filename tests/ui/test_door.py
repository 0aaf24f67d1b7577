"""What stands in front of Gradio: the routes of our pages, bounds for each user, a queue that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import gradio as gr
import httpx
import pytest
from fastapi import FastAPI, Request

from app.factory import build_services, create_app
from app.routes import failures
from app.settings import Settings
from app.ui.door import guard_mounted
from app.ui.page_sessions import ALL_SESSIONS, USER_EVENTS, USER_SESSIONS, USER_STREAMS, TooManyEvents
from app.ui.steady_queue import make_steady
from tests.patience import PATIENCE

JOIN = "/gradio_api/queue/join"


class Bench:
    """A small page. Its function 0 waits for ``go``, 1 answers at once and 2 does outside the queue."""

    def __init__(self) -> None:
        self.began, self.go = asyncio.Event(), asyncio.Event()
        self.app = FastAPI()
        failures.install(self.app)
        with gr.Blocks(analytics_enabled=False) as self.blocks:
            box = gr.Textbox()
            box.submit(self._wait, box, box, concurrency_limit=1)
            box.change(self._answer, box, box)
            box.blur(self._answer, box, box, queue=False)
        self.blocks.queue(api_open=False)
        make_steady(self.blocks, at_once=8)
        gr.mount_gradio_app(self.app, self.blocks, "/", auth_dependency=_user, ssr_mode=False)
        guard_mounted(self.app, self.blocks, _user)
        self.sessions = self.app.router.routes[-1].app.sessions  # type: ignore[attr-defined]
        self.queue: Any = self.blocks._queue

    async def _wait(self, text: str) -> str:
        self.began.set()
        await self.go.wait()
        return text

    async def _answer(self, text: str) -> str:
        return text

    def client(self, user: str | None) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app),
            base_url="http://page",
            headers={"x-user": user} if user else {},
        )


async def _user(request: Request) -> str | None:
    return request.headers.get("x-user")


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    async with made.app.router.lifespan_context(made.app):
        yield made
        made.go.set()
        made.queue.close()


def event(session: str, function: int = 0, **changes: Any) -> dict[str, Any]:
    return {"data": ["words"], "fn_index": function, "session_hash": session} | changes


async def answered(http: httpx.AsyncClient, session: str) -> str:
    """Send an event and read the messages of its session to the end."""
    joined = await http.post(JOIN, json=event(session, 1))
    assert joined.status_code == 200, joined.text
    async with asyncio.timeout(PATIENCE):
        return (await http.get("/gradio_api/queue/data", params={"session_hash": session})).text


async def test_one_user_cannot_fill_the_queue_for_another(bench: Bench) -> None:
    async with bench.client("heavy") as heavy, bench.client("light") as light:
        answers = [await heavy.post(JOIN, json=event(f"h{number}")) for number in range(USER_SESSIONS + 8)]
        assert [answer.status_code for answer in answers] == [200] * USER_SESSIONS + [429] * 8
        assert int(answers[-1].headers["Retry-After"]) > 0
        again = [await heavy.post(JOIN, json=event("h1")) for _ in range(USER_EVENTS)]
        assert [answer.status_code for answer in again].count(200) == USER_EVENTS - USER_SESSIONS
        assert '"process_completed"' in await answered(light, "l1")


async def test_sessions_that_do_nothing_are_forgotten(bench: Bench) -> None:
    async with bench.client("ann") as http:
        for number in range(USER_SESSIONS + 20):
            assert (await http.post(JOIN, json=event(f"s{number}", 1))).status_code == 200
            async with asyncio.timeout(PATIENCE):
                while bench.queue.event_ids_to_events:  # noqa: ASYNC110 - there is no event to wait for
                    await asyncio.sleep(0.001)
        assert len(bench.sessions) == len(bench.queue.pending_messages_per_session) == USER_SESSIONS
        assert len(bench.queue.pending_event_ids_session) == USER_SESSIONS
        assert '"process_completed"' in await answered(http, "s0")


async def test_all_sessions_together_stay_below_what_gradio_holds(bench: Bench) -> None:
    assert bench.queue.pending_messages_per_session.max_size > ALL_SESSIONS
    for number in range(ALL_SESSIONS + 5):
        with bench.sessions.joining(f"user {number // USER_SESSIONS}", f"s{number}"):
            pass
    assert len(bench.sessions) == ALL_SESSIONS


async def test_a_session_in_use_is_nobody_elses(bench: Bench) -> None:
    async with bench.client("ann") as ann, bench.client("eve") as eve:
        assert (await ann.post(JOIN, json=event("mine"))).status_code == 200
        assert (await eve.post(JOIN, json=event("mine"))).status_code == 404
        for path in ("queue/data?session_hash=mine", "heartbeat/mine"):
            assert (await eve.get(f"/gradio_api/{path}")).status_code == 404


async def test_streams_of_one_user_are_bounded(bench: Bench) -> None:
    with contextlib.ExitStack() as held:
        for number in range(USER_STREAMS):
            held.enter_context(bench.sessions.streaming("data", "ann", f"s{number}"))
        with pytest.raises(TooManyEvents), bench.sessions.streaming("data", "ann", "one more"):
            pass
    with bench.sessions.streaming("data", "ann", "one more"):
        pass


async def test_the_queue_goes_on_without_a_session_that_is_gone(bench: Bench) -> None:
    async with bench.client("ann") as http:
        for session in ("first", "gone", "third"):
            await http.post(JOIN, json=event(session))
        del bench.queue.pending_messages_per_session["gone"]
        bench.go.set()
        async with asyncio.timeout(PATIENCE):
            assert '"process_completed"' in await answered(http, "third")
    assert not bench.queue.stopped


async def test_a_queue_that_failed_is_started_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = bench.queue.get_events

    def fails() -> None:
        monkeypatch.setattr(bench.queue, "get_events", real)
        raise KeyError("an event")

    async with bench.client("ann") as http:
        await http.post(JOIN, json=event("running"))
        await asyncio.wait_for(bench.began.wait(), PATIENCE)
        monkeypatch.setattr(bench.queue, "get_events", fails)
        with caplog.at_level(logging.ERROR):
            assert '"process_completed"' in await answered(http, "next")
        assert "started again" in caplog.text
        bench.go.set()  # what ran meanwhile is not lost
        assert (await http.get("/gradio_api/queue/data?session_hash=running")).text.count("words") >= 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"data": []},
        {"data": ["words", "words"]},
        {"data": "words"},
        {"fn_index": 7},
        {"fn_index": None},
        {"fn_index": 2},
        {"session_hash": None},
        {"session_hash": "words words"},
        {"trigger_id": "words"},
    ],
)
async def test_an_event_that_does_not_fit_is_refused_and_not_printed(
    bench: Bench, wrong: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    async with bench.client("ann") as http:
        answer = await http.post(JOIN, json=event("s", 1) | wrong)
    assert answer.status_code == 422
    assert answer.json()["error"]["message"]
    await asyncio.sleep(0.05)
    assert "words" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("body", ["", "nul", "[" * 100_000])
async def test_a_body_that_is_no_json(bench: Bench, body: str) -> None:
    async with bench.client("ann") as http:
        assert (await http.post(JOIN, content=body)).status_code == 400


ROUTES = [
    ("POST", "component_server", 404),
    ("POST", "run/predict", 404),
    ("POST", "call/answer", 404),
    ("POST", "upload", 404),
    ("POST", "reset", 404),
    ("POST", "cancel", 404),
    ("GET", "dev/reload", 404),
    ("GET", "openapi.json", 404),
    ("GET", "startup-events", 404),
    ("GET", "file=/etc/passwd", 404),
    ("GET", "heartbeat/s", 401),
    ("GET", "queue/data?session_hash=s", 401),
    ("POST", "queue/join", 401),
]


async def test_only_the_routes_of_our_page_are_there(bench: Bench, tmp_path: Path) -> None:
    real = create_app(Settings(home=tmp_path), services=build_services(Settings(home=tmp_path)))
    transport = httpx.ASGITransport(real)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://app") as app,
        bench.client(None) as page,
        bench.client("ann") as ann,
    ):
        for method, path, status in ROUTES:
            for stranger in (app, page):
                answer = await stranger.request(method, f"/gradio_api/{path}", json={})
                assert answer.status_code == status, (method, path)
            if status == 404:
                answer = await ann.request(method, f"/gradio_api/{path}", json={})
                assert answer.status_code == 404, (method, path)
        for path in ("/config", "/gradio_api/app_id", "/gradio_api/info"):
            assert (await ann.get(path)).status_code == 200
            assert (await page.get(path)).status_code == 401
