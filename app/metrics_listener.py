"""A second port, for Prometheus alone: the metrics of app and engine, without a key.

The app's own port wants an administrator's key of whoever is not on this machine; the engine's port changes
with every start, and only the app has its key. This port is for a network that only the operator's monitoring
can reach, such as that of docker-compose.yml.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from app.errors import EngineNotReady
from app.services import Services
from tangram.errors import TangramError

TIMEOUT_SECONDS = 5.0


class _Server(uvicorn.Server):
    """Leaves signals to the server of the app itself."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def metrics_app(services: Services) -> Starlette:
    """GET /metrics: the app's. GET /engine: the engine's, 503 while it does not answer."""

    async def own(_: Request) -> Response:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                services.metrics.pool((await services.engine.memory()).get("pool", {}))
        except (EngineNotReady, TangramError, TimeoutError):
            services.metrics.forget_pool()
        return Response(services.metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def engine(_: Request) -> Response:
        try:
            async with asyncio.timeout(TIMEOUT_SECONDS):
                text = await services.engine.metrics_text()
        except (EngineNotReady, TangramError, TimeoutError):
            return PlainTextResponse("the engine does not answer\n", status_code=503)
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    return Starlette(routes=[Route("/metrics", own), Route("/engine", engine)])


@contextlib.asynccontextmanager
async def metrics_port(services: Services) -> AsyncIterator[None]:
    """Serve meanwhile, where the settings name a port. Raises OSError where it is taken."""
    port = services.settings.metrics_port
    if not port:
        yield
        return
    config = uvicorn.Config(
        metrics_app(services), lifespan="off", log_config=None, access_log=False, server_header=False
    )
    listening = socket.create_server(("", port))
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]), name="metrics port")
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait({task})
        listening.close()
