"""What happens to every request, as plain ASGI: nothing here hides a client's disconnect from a stream."""

from __future__ import annotations

import logging
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.accounts import COOKIE, Accounts
from app.metrics import Metrics
from app.routes.failures import failure
from app.transfer.reading import MAX_FILE
from db.errors import DbError

log = logging.getLogger(__name__)

MAX_BODY = 16 * 1024 * 1024
MAX_FORM = 64 * 1024
_LIMITS = dict.fromkeys(("/login", "/setup"), MAX_FORM) | {"/api/import": MAX_FILE}

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = _SAFE | {"POST", "PUT", "PATCH", "DELETE"}
_SIGN_IN_PAGES = frozenset({"/login", "/setup"})
_OWN_ANSWERS = ("/api/", "/v1/", "/health/", "/metrics")
_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",  # Gradio's pages carry inline scripts
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",  # what a model writes cannot load a picture from elsewhere
        "media-src 'self' data: blob:",
        "font-src 'self' data:",
        "worker-src 'self' blob:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Observe:
    """Adds the security headers and counts the answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._metrics.request(method, _route(scope), message["status"])
            await send(message)

        await self._app(scope, receive, counted)


class LimitBody:
    """Refuses bodies that no honest request has, before they fill the memory."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = _LIMITS.get(scope["path"], MAX_BODY)
        words = f"The request is larger than {limit} bytes."
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told) > limit:
            await failure(413, words, code="too_large")(scope, receive, send)
            return
        left = limit

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, words)  # where the body is read, and answered there
            return message

        await self._app(scope, counted, send)


class OriginGuard:
    """Refuses changes that another site's page makes a signed-in browser ask for.

    Browsers name the page's origin on every such request, and no page can forge it. The sign-in forms are
    guarded without a cookie too. Programs that send no origin are let through: they carry no one's cookie.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = failure(403, "This request comes from another site's page.", code="wrong_origin")
            await refusal(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["method"] in _SAFE:
            return True
        connection = HTTPConnection(scope)
        if COOKIE not in connection.cookies and scope["path"] not in _SIGN_IN_PAGES:
            return True
        headers = connection.headers
        origin = headers.get("origin")
        if origin is not None:
            return urlsplit(origin).netloc.lower() == headers.get("host", "").lower()
        return headers.get("sec-fetch-site", "same-origin") in ("same-origin", "none")


class Identify:
    """Finds the user of a request, and sends the browser of a stranger to the sign-in page."""

    def __init__(self, app: ASGIApp, accounts: Accounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            user = await self._accounts.identify(HTTPConnection(scope))
            page = (
                "/setup"
                if user is None and _is_page(scope) and await self._accounts.needs_setup()
                else "/login"
            )
        except DbError:
            log.exception("the database cannot tell who is asking")
            if scope["type"] == "http":
                await failure(503, "The database does not answer.", code="storage_unavailable")(
                    scope, receive, send
                )
            return
        scope.setdefault("state", {})["user"] = user
        if user is None and _is_page(scope):
            await RedirectResponse(page, status_code=303)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _is_page(scope: Scope) -> bool:
    path = scope["path"]
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and path not in _SIGN_IN_PAGES
        and not path.startswith(_OWN_ANSWERS)
        and "text/html" in Headers(scope=scope).get("accept", "")
    )


def _route(scope: Scope) -> str:
    """The route's pattern, so that ids do not become labels; the pages are one route each."""
    path = getattr(scope.get("route"), "path", None)
    if path is None:
        path = "/admin" if scope["path"].startswith("/admin") else "/"
    return str(path)
