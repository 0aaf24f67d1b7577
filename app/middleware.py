"""What happens to every request, as plain ASGI: nothing here hides a client's disconnect from a stream."""

from __future__ import annotations

import logging
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.accounts import COOKIE, Accounts, remember
from app.logs import ACCESS
from app.metrics import Metrics
from app.request_context import CURRENT, RequestInfo, new_request_id
from app.routes.failures import failure, unexpected
from app.transfer.reading import MAX_FILE
from db.errors import DbError

log = logging.getLogger(__name__)

MAX_BODY = 16 * 1024 * 1024
MAX_FORM = 64 * 1024
_LIMITS = dict.fromkeys(("/login", "/setup"), MAX_FORM) | {"/api/import": MAX_FILE}

_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = _SAFE | {"POST", "PUT", "PATCH", "DELETE"}
_SIGN_IN_PAGES = frozenset({"/login", "/setup", "/invite", "/reset"})
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
    """Gives the request its id, adds the security headers, counts and logs the answer."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0
        client = scope.get("client")
        info = RequestInfo(
            new_request_id(Headers(scope=scope).get("x-request-id")), client[0] if client else ""
        )
        method = scope["method"] if scope["method"] in _METHODS else "other"

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-ID"] = info.id
                if scope["path"] in _SIGN_IN_PAGES:
                    headers.setdefault("Cache-Control", "no-store")
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
                self._metrics.request(method, _route(scope), status)
            await send(message)

        token = CURRENT.set(info)
        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            if status:
                raise  # it is too late for another answer: the connection is cut
            # Starlette would answer this outside of here: without the id, uncounted.
            await unexpected(Request(scope), error)(scope, receive, counted)
        finally:
            fields = {
                "method": method,
                "route": _route(scope),
                "status": status,
                "ms": round((time.monotonic() - began) * 1000),
                "address": info.address,
            }
            ACCESS.info("request", extra={"fields": fields})
            CURRENT.reset(token)


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
            page = urlsplit(origin)
            if scope["scheme"] in ("https", "wss") and page.scheme != "https":
                return False  # a page that came in the clear can be anybody's
            return page.netloc.lower() == headers.get("host", "").lower()
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
            identity = await self._accounts.recognise(HTTPConnection(scope))
            user = identity.user if identity is not None else None
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
        remember(HTTPConnection(scope), identity)
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
