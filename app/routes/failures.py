"""Errors become answers here: one shape, OpenAI's, for every route."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from app.errors import AppError
from app.sse import ClientGone
from db.errors import Conflict, DbError, InvalidInput, NotFound
from tangram.errors import EngineRejected, EngineUnavailable

log = logging.getLogger(__name__)

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CLIENT_GONE = 499


class Failure(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class FailureBody(BaseModel):
    """The shape of every error answer."""

    error: Failure


FAILURES: dict[int | str, dict[str, Any]] = {"default": {"model": FailureBody, "description": "An error."}}
"""For the description of the routes."""


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
    if not isinstance(error, RequestValidationError) or not error.errors():
        return unexpected(request, error)
    found = [(_place(one, error.body), one) for one in error.errors()]
    # Of what is said about a union's branches, that about the deepest place is about the one that was meant.
    keys, said = max(found, key=lambda pair: len(pair[0]))
    if said["type"] == "json_invalid":  # its place is a position in the text, not a field
        return failure(400, "The body is not valid JSON.", code="invalid_request")
    place = ".".join(keys)
    message = f"{place}: {said['msg']}" if place else str(said["msg"])
    return failure(400, message, code="invalid_request", param=place or None)


def _place(said: Mapping[str, Any], body: Any) -> list[str]:
    """Which field a complaint is about, without the names of a union's branches, which no client wrote."""
    keys = [key for key in said["loc"] if key != "body"]
    if said["loc"][:1] != ("body",) or not isinstance(body, dict):
        return [str(key) for key in keys]
    found: list[str] = []
    for place, key in enumerate(keys, start=1):
        try:
            body = body[key]
        except (KeyError, IndexError, TypeError):
            if said["type"] != "missing" or place != len(keys):
                continue
        found.append(str(key))
    return found


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
