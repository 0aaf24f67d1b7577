"""Only administrators get in: at the door, behind it, and in every handler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest
from starlette.requests import Request
from starlette.routing import Mount
from starlette.types import Message

from admin.access import Access, AdminOnly
from admin.errors import NotAllowed
from admin.guarded import guarded
from admin.live_plot import SCRIPT_NAME
from tests.admin.conftest import Bench, Installed
from tests.admin.support import Person

PAGE = {"accept": "text/html,application/xhtml+xml"}


def request(**headers: str) -> Request:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw, "query_string": b""})


async def test_a_strangers_browser_goes_to_the_sign_in(installed: Installed) -> None:
    await installed.services.accounts.create_user("ann", "a long password", is_admin=True)
    async with installed.client(None) as http:
        for path in ("/admin", "/admin/"):
            answer = await http.get(path, headers=PAGE)
            assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        answer = await http.get("/admin/config")
        assert answer.status_code == 401


async def test_a_user_is_refused_and_an_administrator_let_in(installed: Installed) -> None:
    async with installed.client("ben") as user, installed.client("ann", is_admin=True) as admin:
        refused = await user.get("/admin/", headers=PAGE)
        assert refused.status_code == 403
        assert "for administrators" in refused.text
        assert "gradio" not in refused.text
        let_in = await admin.get("/admin/", headers=PAGE)
        assert let_in.status_code == 200
        assert "gradio_config" in let_in.text
        moved = await admin.get("/admin", headers=PAGE)
        assert (moved.status_code, moved.headers["location"]) == (307, "/admin/")


def gradio_paths(app: Any) -> list[tuple[str, str]]:
    """(method, path) of everything that Gradio serves below the console."""
    [mounted] = [route for route in app.router.routes if isinstance(route, Mount) and route.path == "/admin"]
    inner = mounted.app._app._app  # behind the door for administrators, and the one before Gradio
    found = []
    for route in inner.router.routes:
        path = getattr(route, "path", "")
        for name in ("path:path", "path", "event_id", "session_hash", "component_id", "type", "api_name"):
            path = path.replace("{" + name + "}", "x")
        found += [(method, path) for method in getattr(route, "methods", None) or ["GET"]]
    return found


async def test_every_route_below_is_behind_the_door(installed: Installed) -> None:
    paths = [*gradio_paths(installed.app), ("GET", f"/{SCRIPT_NAME}")]
    assert len(paths) > 30
    async with installed.client("ben") as user, installed.client(None) as stranger:
        origin = {"origin": "http://localhost"}
        for method, path in paths:
            answer = await user.request(method, f"/admin{path}", headers=origin)
            assert answer.status_code == 403, (method, path)
            assert answer.json()["error"]["code"] == "forbidden" if method != "HEAD" else True
            answer = await stranger.request(method, f"/admin{path}", headers=origin)
            assert answer.status_code == 401, (method, path)


async def test_another_sites_page_cannot_use_an_administrators_session(installed: Installed) -> None:
    async with installed.client("ann", is_admin=True) as admin:
        answer = await admin.post(
            "/admin/gradio_api/run/predict", json={}, headers={"origin": "http://evil.example"}
        )
        assert answer.status_code == 403


async def test_an_administrator_finds_only_the_routes_that_the_console_uses(installed: Installed) -> None:
    origin = {"origin": "http://localhost"}
    async with installed.client("ann", is_admin=True) as admin:
        for method, path in (("GET", "openapi.json"), ("GET", "dev/reload"), ("POST", "component_server")):
            answer = await admin.request(method, f"/admin/gradio_api/{path}", json={}, headers=origin)
            assert answer.status_code == 404, path
        event = {"fn_index": 0, "data": ["words"], "session_hash": "s"}
        for path in ("run/predict", "queue/join"):
            answer = await admin.post(f"/admin/gradio_api/{path}", json=event, headers=origin)
            assert answer.status_code == 422, path


async def test_a_websocket_is_closed(bench: Bench) -> None:
    bench.person = Person("2", False)
    door = AdminOnly(bench.app, bench.console.access)
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    await door({"type": "websocket", "path": "/admin/", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    ("person", "message"),
    [(None, "Sign in first"), (Person("2", False), "for administrators")],
)
async def test_a_handler_asks_again(bench: Bench, person: Person | None, message: str) -> None:
    ran: list[Any] = []

    async def handler(*values: Any) -> str:
        ran.append(values)
        return "done"

    access = bench.console.access
    event = gr.Request(request=request())
    assert await guarded(access, handler)(event, 1, 2) == "done"
    assert await guarded(access, handler, with_user=True)(event, 3) == "done"
    assert ran == [(1, 2), (Person("1", True), 3)]
    bench.person = person
    with pytest.raises(gr.Error, match=message):
        await guarded(access, handler)(event, 4)
    with pytest.raises(NotAllowed, match=message):
        await access.require_admin(event)
    assert len(ran) == 2


async def test_an_event_without_a_request_is_a_strangers() -> None:
    async def everybody(_: Any) -> Person:
        return Person("1", True)

    with pytest.raises(NotAllowed):
        await Access(everybody).require_admin(None)
    with pytest.raises(NotAllowed):
        await Access(everybody).require_admin(gr.Request(headers={}))


async def test_a_session_that_ends_ends_the_rights(installed: Installed) -> None:
    async with installed.client("ann", is_admin=True) as admin:
        cookies = "; ".join(f"{name}={value}" for name, value in admin.cookies.items())
        event = gr.Request(request=request(cookie=cookies))
        assert (await installed.console.access.require_admin(event)).is_admin
        await admin.post("/logout", headers={"origin": "http://localhost"})
        with pytest.raises(NotAllowed, match="Sign in first"):
            await installed.console.access.require_admin(event)


def test_every_handler_is_guarded_and_none_is_public(bench: Bench) -> None:
    [mounted] = [route for route in bench.app.router.routes if isinstance(route, Mount)]
    page: gr.Blocks = mounted.app._app._app.get_blocks()  # type: ignore[attr-defined]
    functions = [fn for fn in page.fns.values() if fn.fn is not None]
    assert len(functions) >= 10
    for function in functions:
        own = guarded.__name__ + ".<locals>.checked"
        assert function.fn.__qualname__ in (own, f"{own}_event"), function.name
        assert function.api_visibility == "private", function.name
        assert function.concurrency_limit is not None
    assert page.show_error is False
    assert page.run_history is False
    assert page.footer_links == []
    assert page.analytics_enabled is False
    assert page.ssr_mode is False
    assert SimpleNamespace(**page.get_config_file())
