"""Entry point ``vllm.endpoint_plugins``: HTTP routes of the engine about its memory."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.datastructures import State

from tangram import control
from tangram.config import printable
from tangram.errors import ConfigError, EngineUnavailable, UnsupportedError
from tangram.profile import build_geometry
from tangram.runtime import Runtime
from tangram.telemetry import CacheSnapshot, memory_report, preview_report

TUNABLE = ("retention", "group_size", "alpha", "scope")


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)


class TangramEndpoints:
    """``GET /tangram/memory`` and ``POST /tangram/preview``."""

    name = "tangram"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds its application."""
        app.add_api_route("/tangram/memory", self.memory, methods=["GET"])
        app.add_api_route("/tangram/preview", self.preview, methods=["POST"])

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Called by vLLM once the engine is up."""
        if engine_client is None:
            raise UnsupportedError("the memory endpoints need an engine")
        vllm_config = engine_client.vllm_config
        self.runtime = Runtime.from_vllm(vllm_config)
        self.socket: Path = control.socket_path(vllm_config.instance_id)

    async def _snapshot(self) -> CacheSnapshot:
        return CacheSnapshot.from_dict(await asyncio.to_thread(control.call, self.socket, "memory"))

    async def memory(self) -> JSONResponse:
        """The pool and every head's share of it, now."""
        own = self.runtime
        try:
            snapshot = await self._snapshot()
        except EngineUnavailable as error:
            return _error(503, str(error))
        return JSONResponse(
            memory_report(snapshot, own.geometry, own.shape, own.config, own.budgets(), time.time())
        )

    async def preview(self, request: Request) -> JSONResponse:
        """What other settings would cost, without changing anything."""
        own = self.runtime
        try:
            changes = await request.json()
        except (ValueError, RecursionError):
            return _error(400, 'body: must be a JSON object such as {"retention": 0.25}')
        if not isinstance(changes, dict):
            return _error(400, 'body: must be a JSON object such as {"retention": 0.25}')
        try:
            for name in changes:
                if name not in TUNABLE:
                    raise ConfigError(
                        printable(name), f"cannot be previewed; there are: {', '.join(TUNABLE)}"
                    )
            config = type(own.config).from_mapping(own.config.to_dict() | changes)
            geometry = build_geometry(config, own.shape, own.profile)
            budgets = own.profile.budgets(config.retention, config.alpha)
            snapshot = await self._snapshot()
        except ConfigError as error:
            return _error(400, str(error))
        except EngineUnavailable as error:
            return _error(503, str(error))
        pool_bytes = snapshot.total_pages * own.geometry.page_bytes
        return JSONResponse(preview_report(geometry, own.shape, budgets, pool_bytes))


def create_plugin() -> TangramEndpoints:
    """The factory that the entry point names."""
    return TangramEndpoints()
