"""Who may see the console: signed-in administrators, checked at the door and again in every handler."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from html import escape
from typing import Protocol

import gradio as gr
from starlette.requests import HTTPConnection
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from admin.errors import NotAllowed

LOGIN_PATH = "/login"
STRANGER_TEXT = "Sign in first."
FORBIDDEN_TEXT = "This page is for administrators. Ask one of them to change the engine's settings."


class SignedIn(Protocol):
    """The part of a user's view that the console needs."""

    @property
    def id(self) -> str: ...

    @property
    def is_admin(self) -> bool: ...


Resolver = Callable[[HTTPConnection], Awaitable[SignedIn | None]]


@dataclass(frozen=True)
class Access:
    """Answers who is asking; ``resolve`` reads a request's session and gives ``None`` for a stranger."""

    resolve: Resolver

    async def admin_id(self, request: HTTPConnection) -> str | None:
        """For Gradio: the administrator's id, or ``None`` for anybody else."""
        user = await self.resolve(request)
        return user.id if user is not None and user.is_admin else None

    async def require_admin(self, request: gr.Request | None) -> SignedIn:
        """The administrator behind a Gradio event; raises :class:`NotAllowed` for anybody else.

        The session may have ended, or the rights been withdrawn, since the page was opened.
        """
        connection = request.request if request is not None else None
        if connection is None:
            raise NotAllowed(STRANGER_TEXT)
        user = await self.resolve(connection)
        if user is None:
            raise NotAllowed(STRANGER_TEXT)
        if not user.is_admin:
            raise NotAllowed(FORBIDDEN_TEXT)
        return user


class AdminOnly:
    """ASGI wrapper that lets administrators through to everything below, static files included."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer 303 (a stranger's page), 401 (a stranger's data) or 403."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        user = await self._access.resolve(connection)
        if user is not None and user.is_admin:
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        refusal = _refusal(connection, scope["method"], stranger=user is None)
        await refusal(scope, receive, send)


def _refusal(connection: HTTPConnection, method: str, stranger: bool) -> Response:
    page = method in ("GET", "HEAD") and "text/html" in connection.headers.get("accept", "")
    if not page:
        text = STRANGER_TEXT if stranger else FORBIDDEN_TEXT
        code = "not_signed_in" if stranger else "forbidden"
        body = {"error": {"message": text, "type": "invalid_request_error", "param": None, "code": code}}
        return JSONResponse(body, status_code=401 if stranger else 403)
    if stranger:
        return RedirectResponse(LOGIN_PATH, status_code=303)
    return HTMLResponse(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        "<title>Administrators only</title><body style='font:16px/1.5 system-ui,sans-serif;max-width:34rem;"
        f"margin:15vh auto;padding:0 1rem'><h1>Administrators only</h1><p>{escape(FORBIDDEN_TEXT)}</p>"
        "<p><a href='/'>Back to the chat</a></p></body></html>",
        status_code=403,
    )
