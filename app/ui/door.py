"""In front of a mounted Gradio app: the routes that our pages use, as much as one user needs of them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.errors import BadRequest
from app.routes.failures import failure
from app.ui.page_sessions import PageSessions

UserOf = Callable[[Request], Awaitable[str | None]]

API = "/gradio_api"
JOIN, DATA, HEARTBEAT, DIRECT = (
    f"{API}/queue/join",
    f"{API}/queue/data",
    f"{API}/heartbeat/",
    f"{API}/run/predict",
)
_PUBLIC = re.compile(r"/(static|assets)/.+|/theme\.css|/gradio_api/theme\.css|/favicon\.ico|/robots\.txt")
_READ = re.compile(r"/|/config|/gradio_api/(info|app_id|queue/data|heartbeat/[^/]+)")
_UPLOADED = re.compile(r"/gradio_api/(upload_progress|file=.+)")
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FIELDS = ("data", "event_data", "fn_index", "trigger_id", "session_hash")


class Unprocessable(BadRequest):
    """The event does not fit the page's function."""

    status = 422


def guard_mounted(
    app: FastAPI, blocks: gr.Blocks, user_of: UserOf, *, direct: bool = False, uploads: bool = False
) -> None:
    """Put a door before ``blocks``, which was mounted last. The options are those of :class:`Door`."""
    route = app.router.routes[-1]
    if not isinstance(route, Mount):
        raise TypeError("Gradio did not mount an application")
    route.app = Door(route.app, blocks, user_of, direct=direct, uploads=uploads)


@dataclass(frozen=True)
class _Asked:
    """A request for the page. path: below the mount; user: None for a stranger."""

    scope: Scope
    path: str
    user: str | None

    @property
    def reads(self) -> bool:
        return self.scope["method"] in ("GET", "HEAD")

    @property
    def session(self) -> str:
        if self.path.startswith(HEARTBEAT):
            return self.path.removeprefix(HEARTBEAT)
        return Request(self.scope).query_params.get("session_hash", "")


class Door:
    """ASGI wrapper of a Gradio app.

    Args:
        user_of: who may use the page: a user's id, or None for anybody else.
        direct: whether the page has functions outside the queue.
        uploads: whether files are given to the page.
    """

    def __init__(
        self, app: ASGIApp, blocks: gr.Blocks, user_of: UserOf, *, direct: bool, uploads: bool
    ) -> None:
        self._app = app
        self._functions = blocks.fns
        self._user_of = user_of
        self._direct = direct
        self._uploads = uploads
        self.sessions = PageSessions(blocks._queue)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", "").rstrip("/")) or "/"
        asked = _Asked(scope, path, await self._user_of(Request(scope)))
        try:
            await self._pass(asked, receive, send)
        except ClientDisconnect:
            return

    async def _pass(self, asked: _Asked, receive: Receive, send: Send) -> None:
        """Raises AppError for what is refused; the app around answers it."""
        scope, path, user = asked.scope, asked.path, asked.user
        if asked.reads and _PUBLIC.fullmatch(path):
            await self._app(scope, receive, send)
        elif not self._known(asked):
            await failure(404, "There is no such page.", code="not_found")(scope, receive, send)
        elif user is None:
            await failure(401, "Sign in first.", code="not_signed_in")(scope, receive, send)
        elif path in (JOIN, DIRECT):
            await self._event(asked, user, receive, send)
        elif path == DATA or path.startswith(HEARTBEAT):
            if not _SESSION.fullmatch(asked.session):
                raise Unprocessable("session_hash: not the name of a session", param="session_hash")
            with self.sessions.streaming(path[:20], user, asked.session):
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _known(self, asked: _Asked) -> bool:
        if asked.reads:
            read = _READ.fullmatch(asked.path) or (self._uploads and _UPLOADED.fullmatch(asked.path))
            return bool(read)
        if asked.scope["method"] != "POST":
            return False
        return (
            asked.path == JOIN
            or (self._direct and asked.path == DIRECT)
            or (self._uploads and asked.path == f"{API}/upload")
        )

    async def _event(self, asked: _Asked, user: str, receive: Receive, send: Send) -> None:
        event = self._checked(await Request(asked.scope, receive).body(), queued=asked.path == JOIN)
        with contextlib.ExitStack() as held:
            if asked.path == JOIN:
                held.enter_context(self.sessions.joining(user, event["session_hash"]))
            body = json.dumps(event).encode()
            await self._app(_with_length(asked.scope, len(body)), _replay(body, receive), send)

    def _checked(self, body: bytes, *, queued: bool) -> dict[str, Any]:
        """The event in a request's body. Gradio would print the values of one that does not fit."""
        try:
            sent = json.loads(body)
        except (ValueError, RecursionError):
            raise BadRequest("The body is not valid JSON.") from None
        if not isinstance(sent, dict):
            raise Unprocessable("The body must be an object.")
        event = {name: sent.get(name) for name in _FIELDS}
        number, data, trigger, session = (
            event[n] for n in ("fn_index", "data", "trigger_id", "session_hash")
        )
        function = self._functions.get(number) if type(number) is int else None
        if function is None or (queued and not function.queue):
            raise Unprocessable("fn_index: the page has no such function", param="fn_index")
        if not isinstance(data, list) or len(data) != len(function.inputs):
            raise Unprocessable(f"data: {len(function.inputs)} values are needed", param="data")
        if not (isinstance(session, str) and _SESSION.fullmatch(session)):
            raise Unprocessable("session_hash: not the name of a session", param="session_hash")
        if trigger is not None and type(trigger) is not int:
            raise Unprocessable("trigger_id: must be a whole number", param="trigger_id")
        return event


def _with_length(scope: Scope, length: int) -> Scope:
    """The request's scope with the length and the kind of the body that replaces the one sent."""
    replaced = (b"content-length", b"content-type", b"transfer-encoding", b"content-encoding")
    headers = [(name, value) for name, value in scope["headers"] if name not in replaced]
    headers += [(b"content-length", str(length).encode()), (b"content-type", b"application/json")]
    return {**scope, "headers": headers}


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` of a request whose body was read already."""
    told = False

    async def replayed() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
