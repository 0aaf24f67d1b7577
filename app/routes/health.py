"""Health checks. Public: they say nothing of anybody's data."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from app.routes.deps import ServicesDep
from db.errors import DbError

router = APIRouter(prefix="/health")


@router.get("/live")
async def live() -> dict[str, str]:
    """The process runs and answers."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(services: ServicesDep, response: Response) -> dict[str, Any]:
    """200 when a message could be answered now: the database reads and the engine is ready. Else 503."""
    status = services.supervisor.status
    try:
        await services.store.count_users()
        storage = "ok"
    except DbError:
        storage = "unavailable"
    ok = status.ready and not status.stalled and storage == "ok"
    if not ok:
        response.status_code = 503
        response.headers["Retry-After"] = "5"
    return {
        "status": "ok" if ok else "unavailable",
        "storage": storage,
        "engine": "stalled" if status.ready and status.stalled else status.state.value,
        "phase": status.phase,
    }
