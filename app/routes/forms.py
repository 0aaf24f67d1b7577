"""What every field of a form must be: text that is Unicode, as in a JSON body."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Form
from pydantic import BeforeValidator
from starlette.responses import HTMLResponse

from app.errors import AppError
from app.routes.json_body import check_json


def _sound(value: Any) -> Any:
    """A form in another encoding can hold half a character. Raises BadRequest."""
    check_json(value)
    return value


Field = Annotated[str, BeforeValidator(_sound), Form()]


def refused(page: str, error: AppError) -> HTMLResponse:
    """The page of a form again, with what an error says."""
    return HTMLResponse(page, status_code=error.status, headers=retry_after(error))


def retry_after(error: AppError) -> dict[str, str]:
    """The header that tells a program when to try again, if the error knows."""
    seconds = getattr(error, "retry_after", None)
    return {"Retry-After": str(seconds)} if seconds is not None else {}
