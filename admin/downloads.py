"""Backups as files to download."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from admin.console import Console
from app.errors import Missing


def backup_response(console: Console) -> Callable[[Request], Awaitable[Response]]:
    """The route's handler; the door before it lets administrators through only. Who took one is recorded:
    it holds everybody's conversations."""

    async def download(request: Request) -> Response:
        user = await console.access.resolve(request)
        try:
            found = await console.services.backups.find(request.path_params["name"])
        except Missing as error:
            return JSONResponse({"error": {"message": error.message, "code": "not_found"}}, status_code=404)
        who = user.id if user is not None else None
        await console.services.audit.record(who, "backup.download", None, {"backup": found.name})
        return FileResponse(
            found.path,
            media_type="application/vnd.sqlite3",
            filename=found.name,
            headers={"Cache-Control": "no-store"},
        )

    return download
