"""Backups as files to download."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from app.backups import Backups
from app.errors import Missing


def backup_response(backups: Backups) -> Callable[[Request], Awaitable[Response]]:
    """The route's handler; the door before it lets administrators through only."""

    async def download(request: Request) -> Response:
        try:
            found = await backups.find(request.path_params["name"])
        except Missing as error:
            return JSONResponse({"error": {"message": error.message, "code": "not_found"}}, status_code=404)
        return FileResponse(
            found.path,
            media_type="application/vnd.sqlite3",
            filename=found.name,
            headers={"Cache-Control": "no-store"},
        )

    return download
