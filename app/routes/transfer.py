"""Conversations out as files and in from files."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from app.routes.deps import ServicesDep, User
from app.transfer.export import ENDINGS, MEDIA_TYPES, Exporter, Format
from app.transfer.importing import understand
from app.transfer.names import disposition

router = APIRouter(prefix="/api")


def _files(*others: str) -> dict[int | str, dict[str, Any]]:
    """What an export answers, for the OpenAPI description: JSON, or another kind of file."""
    return {200: {"content": {kind: {"schema": {"type": "string", "format": "binary"}} for kind in others}}}


@router.get("/conversations/{conversation_id}/export", responses=_files("text/markdown"))
async def export_one(
    conversation_id: str,
    user: User,
    services: ServicesDep,
    format: Format = "json",  # noqa: A002
) -> Response:
    """One conversation as a download: `json` with all branches, `markdown` or `sharegpt` the one shown."""
    exporter = Exporter(services.store, services.database, user.id)
    name, content = await exporter.one(conversation_id, format)
    return Response(content, media_type=MEDIA_TYPES[format], headers=_download(name))


@router.get("/export", responses=_files("application/zip"))
async def export_all(user: User, services: ServicesDep, format: Format = "json") -> Response:  # noqa: A002
    """All own conversations as a download; `markdown` is a ZIP file with a text for each."""
    exporter = Exporter(services.store, services.database, user.id)
    ending, kind = (
        ("zip", "application/zip") if format == "markdown" else (ENDINGS[format], MEDIA_TYPES[format])
    )
    return StreamingResponse(
        _closing(exporter.all(format)), media_type=kind, headers=_download(f"tangram-chat {format}.{ending}")
    )


@router.post("/import", status_code=201)
async def import_file(request: Request, user: User, services: ServicesDep) -> dict[str, Any]:
    """Take in a file, the body as it is: all of it, or nothing and a sentence that names the item."""
    understood = await asyncio.to_thread(understand, await request.body())
    ids = await services.store.import_conversations(user.id, understood.conversations)
    return {
        "conversations": ids,
        "messages": sum(bool(turn.content) for each in understood.conversations for turn in each.messages),
        "skipped_messages": understood.skipped,
    }


async def _closing(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with contextlib.aclosing(chunks):
        async for chunk in chunks:
            yield chunk


def _download(name: str) -> dict[str, str]:
    return {"Content-Disposition": disposition(name), "Cache-Control": "no-store"}
