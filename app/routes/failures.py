"""Errors become answers here: one shape, OpenAI's, for every route."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from app.errors import AppError
from app.sse import ClientGone
from db.errors import Conflict, DbError, InvalidInput, NotFound
from tangram.errors import EngineRejected, EngineUnavailable

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CLIENT_GONE = 499


def failure(
    status: int,
    message: str,
    *,
    code: str | None = None,
    param: str | None = None,
    retry_after: int | None = None,
) -> JSONResponse:
    """An error answer: {"error": {"message", "type", "param", "code"}}."""
    return JSONResponse(
        failure_body(status, message, code=code, param=param),
        status_code=status,
        headers={"Retry-After": str(retry_after)} if retry_after is not None else None,
    )


def failure_body(
    status: int, message: str, *, code: str | None = None, param: str | None = None
) -> dict[str, dict[str, str | None]]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install(app: FastAPI) -> None:
    """Register the handlers."""
    app.add_exception_handler(AppError, _app_error)
    app.add_exception_handler(DbError, _db_error)
    app.add_exception_handler(EngineUnavailable, _engine_unavailable)
    app.add_exception_handler(EngineRejected, _engine_rejected)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, unexpected)


def _app_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, AppError):
        return unexpected(request, error)
    retry = getattr(error, "retry_after", None)
    return failure(error.status, error.message, code=error.code, param=error.param, retry_after=retry)


def _db_error(request: Request, error: Exception) -> Response:
    if isinstance(error, NotFound):
        return failure(404, f"{error}.".capitalize(), code="not_found")
    if isinstance(error, Conflict):
        return failure(409, f"{error}.".capitalize(), code="conflict")
    if isinstance(error, InvalidInput):
        return failure(400, str(error), code="invalid_request", param=error.field)
    log.error("storage: %s", error)
    return failure(
        503, "The history cannot be read or written now.", code="storage_unavailable", retry_after=5
    )


def _engine_unavailable(request: Request, error: Exception) -> Response:
    return failure(
        503, "The engine does not answer. Try again in a moment.", code="engine_not_ready", retry_after=5
    )


def _engine_rejected(request: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, EngineRejected) else 500
    if status >= 500:  # its core died: the server in front of it still answers for a moment
        return _engine_unavailable(request, error)
    # A refusal of our key or route is our fault, not the client's.
    status = status if status in (400, 413, 422) else 502
    return failure(status, f"The engine refused the request: {error}", code="engine_refused")


def _invalid(request: Request, error: Exception) -> Response:
    first = error.errors()[0] if isinstance(error, RequestValidationError) else {}
    if first.get("type") == "json_invalid":  # its place is a position in the text, not a field
        return failure(400, "The body is not valid JSON.", code="invalid_request")
    place = ".".join(str(part) for part in first.get("loc", ()) if part != "body")
    message = f"{place}: {first.get('msg', 'not valid')}" if place else str(first.get("msg", "not valid"))
    return failure(400, message, code="invalid_request", param=place or None)


def _http_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return unexpected(request, error)
    answer = failure(error.status_code, str(error.detail))
    answer.headers.update(error.headers or {})
    return answer


def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


def unexpected(request: Request, error: Exception) -> Response:
    """The answer to an error that nobody foresaw; the log has it."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return failure(500, "Something went wrong here. The server's log has the details.", code="internal_error")
