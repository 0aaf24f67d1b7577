"""Entry point ``vllm.endpoint_plugins``: HTTP routes of the engine about its memory.

They are guarded like vLLM's own: where the engine was started with a key, they want it. vLLM's middleware
looks at paths of its own only, so its check is called here.
"""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import State
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.v1.metrics.prometheus import get_prometheus_registry

from tangram import asked, control, stall, workers
from tangram.config import printable
from tangram.errors import ConfigError, EngineUnavailable, ProfileError, UnsupportedError
from tangram.metrics import TIMEOUT_SECONDS, EngineMetrics
from tangram.predict import predict
from tangram.reports import profile_report, status_report
from tangram.runtime import Runtime
from tangram.telemetry import CacheSnapshot, memory_report

Answer = dict[str, Any] | JSONResponse


def _error(status: int, message: str, **headers: str) -> JSONResponse:
    return JSONResponse(
        {"error": {"message": message, "code": status}}, status_code=status, headers=headers or None
    )


class TangramEndpoints:
    """The routes under ``/tangram``, and ``/metrics`` with the cache's figures added."""

    name = "tangram"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Called by vLLM while it builds its application. A plugin's route replaces vLLM's of that path."""
        for method, path, handler in (
            ("GET", "/tangram/status", self.status),
            ("GET", "/tangram/profile", self.profile),
            ("GET", "/tangram/memory", self.memory),
            ("POST", "/tangram/preview", self.preview),
            ("POST", "/tangram/evict", self.evict),
            ("POST", "/tangram/pin", self.pin),
        ):
            app.add_api_route(path, self._guarded(handler), methods=[method], name=handler.__name__)
        app.add_api_route("/metrics", self.metrics, methods=["GET"])

    async def init_state(self, engine_client: Any, state: State, args: Namespace) -> None:
        """Called by vLLM once the engine is up."""
        if engine_client is None:
            raise UnsupportedError("the memory endpoints need an engine")
        vllm_config = engine_client.vllm_config
        self.serve(
            Runtime.from_vllm(vllm_config),
            vllm_config.instance_id,
            [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key],
        )
        stall.watch(lambda: self._snapshot_now(timeout=TIMEOUT_SECONDS), stall.allowed_seconds())

    def serve(self, runtime: Runtime, instance: str, keys: list[str]) -> None:
        """Answer for the engine of that vLLM instance id. Any of ``keys`` opens; none: open to all."""
        self.runtime = runtime
        self.started = time.monotonic()
        self._ask_scheduler = partial(control.call, control.socket_path(instance))
        self._ask_worker = partial(workers.ask, instance, runtime.geometry.ranks)
        self._lock = AuthenticationMiddleware(FastAPI(), keys) if keys else None
        self._metrics = EngineMetrics(
            lambda: self._snapshot_now(timeout=TIMEOUT_SECONDS),
            partial(self._ask_worker, timeout=TIMEOUT_SECONDS),
            runtime.geometry.page_bytes,
        )

    def _guarded(self, handler: Callable[[Request], Awaitable[Answer]]) -> Callable[..., Any]:
        async def guarded(request: Request) -> Response:
            if self._lock is not None and not self._lock.verify_token(request.headers):
                message = "this engine needs its API key: send it as Authorization: Bearer KEY"
                return _error(401, message, **{"WWW-Authenticate": "Bearer"})
            try:
                answer = await handler(request)
            except (ConfigError, ProfileError) as error:
                return _error(400, str(error))
            except EngineUnavailable as error:
                return _error(503, str(error))
            return answer if isinstance(answer, JSONResponse) else JSONResponse(answer)

        return guarded

    def _snapshot_now(self, **options: Any) -> CacheSnapshot:
        return CacheSnapshot.from_dict(self._ask_scheduler("memory", **options))

    async def _snapshot(self) -> CacheSnapshot:
        return await asyncio.to_thread(self._snapshot_now)

    async def _worker(self) -> dict[str, Any] | None:
        """What the workers say of themselves; None if one does not answer."""
        try:
            return await asyncio.to_thread(self._ask_worker, timeout=TIMEOUT_SECONDS)
        except EngineUnavailable:
            return None

    def _pool_bytes(self, snapshot: CacheSnapshot) -> int:
        return snapshot.total_pages * self.runtime.geometry.page_bytes

    # ---- the routes ---------------------------------------------------------------------------------

    async def status(self, _: Request) -> Answer:
        """What runs, how it is configured and what it has done so far."""
        snapshot, worker = await self._snapshot(), await self._worker()
        return status_report(self.runtime, snapshot, worker, time.monotonic() - self.started)

    async def profile(self, _: Request) -> Answer:
        """The heads' statistics, the budgets that follow, and what they cost."""
        own = self.runtime
        prediction = await asyncio.to_thread(predict, own.config, own.shape, own.profile)
        prediction = prediction.within(self._pool_bytes(await self._snapshot()))
        return profile_report(own, prediction, await self._worker())

    async def memory(self, request: Request) -> Answer:
        """The pool and every head's share of it, now; with ``?sequence=ID`` of one conversation."""
        own, wanted = self.runtime, request.query_params.get("sequence")
        snapshot = await self._snapshot()
        if wanted is not None and all(seq.id != wanted for seq in snapshot.sequences):
            return _error(
                404,
                f"sequence: {printable(wanted)} is not in the pool: it was evicted or never there "
                "(without ?sequence= all that are there are listed)",
            )
        return memory_report(
            snapshot, own.geometry, own.shape, own.config, own.budgets(), time.time(), wanted
        )

    async def preview(self, request: Request) -> Answer:
        """What other settings would cost, without changing anything."""
        own = self.runtime
        config, lengths = asked.preview(await asked.body(request), own.config)
        # An engine in scope uniform never read its profile: that of another scope is read now.
        profile = None if own.config.scope == "uniform" else own.profile
        prediction = await asyncio.to_thread(predict, config, own.shape, profile, lengths)
        return prediction.within(self._pool_bytes(await self._snapshot())).to_dict()

    async def evict(self, request: Request) -> Answer:
        """Drop idle conversations: one, those idle for so long, or all."""
        wanted = asked.evict(await asked.body(request))
        return await asyncio.to_thread(self._ask_scheduler, "evict", **wanted)

    async def pin(self, request: Request) -> Answer:
        """Keep a conversation when room is made for others, or let it go."""
        wanted = asked.pin(await asked.body(request))
        found = await asyncio.to_thread(self._ask_scheduler, "pin", **wanted)
        if found["refused"]:
            return _error(409, f"sequence: {found['refused']}")
        if not found["conversations"]:
            return _error(404, f"sequence: {printable(wanted['sequence'])} is not in the pool")
        return {"conversations": found["conversations"]}

    def metrics(self) -> Response:
        """vLLM's metrics and the cache's. Not async: FastAPI runs it in a thread of its own. vLLM's registry
        is looked up each time: where it gathers the figures of several processes, it is made anew."""
        text = generate_latest(get_prometheus_registry()) + self._metrics.scrape()
        return Response(text, media_type=CONTENT_TYPE_LATEST)


def create_plugin() -> TangramEndpoints:
    """The factory that the entry point names."""
    return TangramEndpoints()
