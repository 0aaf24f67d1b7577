"""The product's own API, over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from app.sse import EventStream
from db.errors import StorageUnavailable
from tests.app.conftest import Product, eventually, serving
from tests.fake_engine import FakeEngine
from tests.patience import PATIENCE


@dataclass
class Sent:
    event: str
    data: Any
    id: str | None


async def read_events(response: httpx.Response) -> AsyncIterator[Sent]:
    fields: dict[str, str] = {}
    async for line in response.aiter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield Sent(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}


async def test_conversations(product: Product) -> None:
    http = product.http
    made = (await http.post("/api/conversations", json={"title": "One", "system_prompt": "S"})).json()
    path = f"/api/conversations/{made['id']}"
    assert (await http.get(path)).json() == made
    assert (await http.patch(path, json={"title": "Uno", "settings": {"temperature": 1}})).json()[
        "title"
    ] == "Uno"
    assert (await http.get(path)).json()["settings"] == {"temperature": 1}
    bad = await http.patch(path, json={"settings": {"temperature": "hot"}})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "temperature")
    for title in ("Two", "Three"):
        await http.post("/api/conversations", json={"title": title})
    listed = (await http.get("/api/conversations", params={"limit": 2})).json()["conversations"]
    rest = await http.get("/api/conversations", params={"before": listed[-1]["cursor"]})
    assert len(listed) == 2
    assert len(rest.json()["conversations"]) == 1
    assert (await http.delete(path)).status_code == 204
    assert (await http.get(path)).status_code == 404
    assert (await http.post(f"{path}/restore")).json()["title"] == "Uno"
    assert (await http.get("/api/conversations", params={"query": "uno"})).json()["conversations"][0][
        "id"
    ] == made["id"]
    assert (await http.get("/api/conversations", params={"limit": 0})).status_code == 400
    for method, wrong in (("GET", "/api/nothing"), ("PUT", "/api/conversations"), ("GET", "/v1/nothing")):
        answer = await http.request(method, wrong)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_send_as_events_then_as_json(product: Product) -> None:
    conversation = await product.conversation()
    path = f"/api/conversations/{conversation}/messages"
    async with product.http.stream("POST", path, json={"content": "Grüße 🦜"}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [event async for event in read_events(response)]
    assert events[0].event == "message"
    assert events[0].data["user"]["content"] == "Grüße 🦜"
    assert events[0].data["reply"]["status"] == "pending"
    done = events[-1]
    assert (done.event, done.data["status"]) == ("done", "complete")
    shown = ""
    for event in events[1:-1]:
        shown = event.data["text"] if event.event == "snapshot" else shown + event.data["text"]
        assert event.id == str(len(shown))
    assert shown == done.data["text"]
    assert done.data["stats"]["cached_tokens"] == 0

    whole = (
        await product.http.post(path, json={"content": "/say ok", "stream": False, "max_tokens": 50})
    ).json()
    assert (whole["reply"]["content"], whole["reply"]["status"]) == ("ok", "complete")
    messages = (await product.http.get(path)).json()["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert "token_ids" not in messages[0]


async def test_a_closed_connection_only_detaches(product: Product, fake_engine: FakeEngine) -> None:
    fake_engine.up_to = 100
    conversation = await product.conversation()
    path = f"/api/conversations/{conversation}/messages"
    last = "0"
    async with product.http.stream("POST", path, json={"content": "/tokens 150"}) as response:
        async for event in read_events(response):
            if event.event == "message":
                reply = event.data["reply"]["id"]
            if int(event.id or 0) > 20:
                last = str(event.id)
                break
    assert (await product.http.get(path)).json()["running_reply_id"] == reply
    fake_engine.up_to = math.inf
    headers = {"Last-Event-ID": last}
    async with product.http.stream("GET", f"/api/replies/{reply}/events", headers=headers) as response:
        rest = [event async for event in read_events(response)]
    assert rest[0].event == "delta"
    final = rest[-1].data["text"]
    assert final[: int(last)] + "".join(event.data["text"] for event in rest[:-1]) == final
    assert fake_engine.aborted == 0
    assert (await product.http.get(f"/api/replies/{reply}")).json()["status"] == "complete"


async def test_stop_regenerate_edit(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    path = f"/api/conversations/{conversation}/messages"
    async with product.http.stream("POST", path, json={"content": "/tokens 2000 /delay 0.05"}) as response:
        events = read_events(response)
        turn = (await anext(events)).data
        while (await anext(events)).event != "delta":
            pass
        busy = await product.http.post(path, json={"content": "x"})
        assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conversation_busy")
        stopped = (await product.http.post(f"/api/replies/{turn['reply']['id']}/stop")).json()
        assert stopped["status"] == "stopped"
        assert [event async for event in events][-1].data["status"] == "stopped"
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)
    again = await product.http.post(
        f"/api/replies/{turn['reply']['id']}/regenerate", json={"stream": False, "max_tokens": 3}
    )
    assert again.json()["reply"]["sibling_count"] == 2
    assert again.json()["reply"]["finish_reason"] == "length"
    edited = await product.http.post(
        f"/api/messages/{turn['user']['id']}/edit", json={"content": "/say new", "stream": False}
    )
    assert edited.json()["reply"]["content"] == "new"
    assert len((await product.http.get(path)).json()["messages"]) == 2
    back = {"active_message_id": turn["user"]["id"]}
    await product.http.patch(f"/api/conversations/{conversation}", json=back)
    assert (await product.http.get(path)).json()["messages"][1]["id"] == again.json()["reply"]["id"]


async def test_deleting_a_conversation_stops_its_reply(product: Product, fake_engine: FakeEngine) -> None:
    conversation = await product.conversation()
    await product.services.generation.send(product.owner, conversation, "/tokens 2000 /delay 0.05")
    await eventually(lambda: len(fake_engine.running) == 1)
    assert (await product.http.delete(f"/api/conversations/{conversation}")).status_code == 204
    assert product.services.generation.active == 0
    await eventually(lambda: not fake_engine.running and fake_engine.aborted == 1)


async def test_errors_have_one_shape(product: Product) -> None:
    conversation = await product.conversation()
    path = f"/api/conversations/{conversation}/messages"
    for body, param in (
        ({}, "content"),
        ({"content": "x", "temperature": 9}, "temperature"),
        ({"content": ""}, "content"),
    ):
        answer = await product.http.post(path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert (await product.http.post(path, content=b"{")).status_code == 400
    long = await product.http.post(path, json={"content": "word " * 9000})
    assert long.json()["error"]["code"] == "context_length_exceeded"
    assert "8192" in long.json()["error"]["message"]


async def test_engine_away(product: Product, fake_engine: FakeEngine) -> None:
    assert (await product.http.get("/health/ready")).json()["engine"] == "ready"
    fake_engine.healthy = False
    while product.services.supervisor.status.ready:
        await product.services.supervisor.changed()
    ready = await product.http.get("/health/ready")
    assert (ready.status_code, ready.json()["engine"]) == (503, "restarting")
    assert (await product.http.get("/health/live")).status_code == 200
    assert (await product.http.get("/api/engine")).json()["restarts"] == 1
    for path, body in (
        (f"/api/conversations/{await product.conversation()}/messages", {"content": "x"}),
        ("/v1/chat/completions", {"model": "fake-model", "messages": [{"role": "user", "content": "x"}]}),
    ):
        answer = await product.http.post(path, json=body)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json()["error"]["code"] == "engine_not_ready"
    metrics = (await product.http.get("/metrics")).text
    assert "tangram_chat_engine_restarts_total 1.0" in metrics
    assert "tangram_chat_pool_pages{" not in metrics


async def test_full_disk_at_the_end_of_a_reply(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    path = f"/api/conversations/{await product.conversation()}/messages"

    async def full(*_: Any, **__: Any) -> None:
        raise StorageUnavailable("disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(product.services.store, "finish_reply", full)
        sent = await product.http.post(path, json={"content": "/say ok", "stream": False})
        reply = sent.json()["reply"]
        assert (reply["status"], reply["content"]) == ("error", "ok")
        assert "disk full" in reply["error"]
        for address, body in ((path, {"content": "x"}), (f"/api/replies/{reply['id']}/stop", None)):
            answer = await product.http.post(address, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_unavailable")
            assert "disk full" in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) > 0
    stopped = await product.http.post(f"/api/replies/{reply['id']}/stop")
    assert (stopped.json()["status"], stopped.json()["content"]) == ("complete", "ok")


async def test_quiet_streams_are_pinged_and_end_with_the_client() -> None:
    closed = asyncio.Event()

    async def silence() -> Any:
        try:
            yield b"data: first\n\n"
            await asyncio.Event().wait()
        finally:
            closed.set()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await EventStream(silence(), ping=0.02)(scope, receive, send)
            return
        for name in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{name}.complete"})

    async with serving(app) as url, httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as http:
        async with http.stream("GET", url) as response, contextlib.aclosing(response.aiter_lines()) as lines:
            seen = [line async for line in _until(lines, ": ping", 2)]
            assert seen[0] == "data: first"
        async with asyncio.timeout(PATIENCE):
            await closed.wait()


async def test_what_events_come_from_is_closed_even_if_none_was_asked_for() -> None:
    """The client is gone before the answer begins, when an engine may have been working for it already."""
    begun, closed = asyncio.Event(), asyncio.Event()

    class Source:
        async def aclose(self) -> None:
            closed.set()

    async def events() -> Any:
        begun.set()
        yield b"data: first\n\n"

    async def gone() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    await EventStream(events(), Source())({"type": "http"}, gone, send)
    assert (begun.is_set(), closed.is_set()) == (False, True)


async def _until(lines: Any, text: str, times: int) -> AsyncIterator[str]:
    async for line in lines:
        yield line
        times -= line == text
        if not times:
            return


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/conversations"])
async def test_a_body_that_is_no_json(product: Product, path: str) -> None:
    answer = await product.http.post(path, content='{"a": ', headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "The body is not valid JSON.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_request",
    }
