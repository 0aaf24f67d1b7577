"""GET /metrics, for Prometheus: from this machine freely, from elsewhere with an administrator's API key."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from app.accounts import current_admin, is_local
from app.errors import EngineNotReady
from app.routes.deps import ServicesDep
from tangram.errors import TangramError

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request, services: ServicesDep) -> Response:
    """The app's own numbers and the engine's pool."""
    if not is_local(request):
        current_admin(request)
    try:
        async with asyncio.timeout(2):
            services.metrics.pool((await services.engine.memory()).get("pool", {}))
    except (EngineNotReady, TangramError, TimeoutError):
        services.metrics.forget_pool()
    return Response(services.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})
