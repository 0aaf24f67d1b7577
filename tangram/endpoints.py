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

from tangram import asked, engines, stall
from tangram.config import printable
from tangram.engines import EngineCore, engines_report, merged, of_each
from tangram.errors import ConfigError, EngineUnavailable, ProfileError, UnsupportedError
from tangram.metrics import TIMEOUT_SECONDS, EngineMetrics
from tangram.predict import Prediction, predict
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
            vllm_config.parallel_config.data_parallel_size,
        )
        looks = [partial(core.snapshot, timeout=TIMEOUT_SECONDS) for core in self.engines]
        stall.watch(looks, stall.allowed_seconds())

    def serve(self, runtime: Runtime, instance: str, keys: list[str], count: int = 1) -> None:
        """Answer for the engine of that vLLM instance id, of ``count`` cores. Any of ``keys`` opens; none:
        open to all."""
        self.runtime = runtime
        self.started = time.monotonic()
        self.engines = [EngineCore(instance, index, runtime.geometry.ranks) for index in range(count)]
        self._lock = AuthenticationMiddleware(FastAPI(), keys) if keys else None
        self._metrics = EngineMetrics(self.engines, runtime.geometry.page_bytes)

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

    async def _snapshots(self) -> list[CacheSnapshot]:
        """Of each core; an answer without one of them would be a wrong one."""
        return await asyncio.to_thread(of_each, self.engines, EngineCore.snapshot)

    async def _worker(self) -> dict[str, Any] | None:
        """What the workers say of themselves; None if one does not answer."""
        return await asyncio.to_thread(engines.workers, self.engines, TIMEOUT_SECONDS)

    async def _within(self, prediction: Prediction) -> Prediction:
        """With how many conversations fit the pools of this engine."""
        page_bytes = self.runtime.geometry.page_bytes
        return prediction.within(*(one.total_pages * page_bytes for one in await self._snapshots()))

    # ---- the routes ---------------------------------------------------------------------------------

    async def status(self, _: Request) -> Answer:
        """What runs, how it is configured and what it has done so far."""
        snapshots, worker = await self._snapshots(), await self._worker()
        report = status_report(self.runtime, merged(snapshots), worker, time.monotonic() - self.started)
        return report | {"engines": engines_report(snapshots, self.runtime.geometry)}

    async def profile(self, _: Request) -> Answer:
        """The heads' statistics, the budgets that follow, and what they cost."""
        own = self.runtime
        prediction = await asyncio.to_thread(predict, own.config, own.shape, own.profile)
        return profile_report(own, await self._within(prediction), await self._worker())

    async def memory(self, request: Request) -> Answer:
        """The pool and every head's share of it, now; with ``?sequence=ID`` of one conversation."""
        own, wanted = self.runtime, request.query_params.get("sequence")
        snapshots = await self._snapshots()
        snapshot = merged(snapshots)
        if wanted is not None and all(seq.id != wanted for seq in snapshot.sequences):
            return _error(
                404,
                f"sequence: {printable(wanted)} is not in the pool: it was evicted or never there "
                "(without ?sequence= all that are there are listed)",
            )
        report = memory_report(
            snapshot, own.geometry, own.shape, own.config, own.budgets(), time.time(), wanted
        )
        return report | {"scorer": own.scorer, "engines": engines_report(snapshots, own.geometry)}

    async def preview(self, request: Request) -> Answer:
        """What other settings would cost, without changing anything."""
        own = self.runtime
        config, lengths = asked.preview(await asked.body(request), own.config)
        # An engine in scope uniform never read its profile: that of another scope is read now.
        profile = None if own.config.scope == "uniform" else own.profile
        prediction = await asyncio.to_thread(predict, config, own.shape, profile, lengths)
        return (await self._within(prediction)).to_dict()

    async def evict(self, request: Request) -> Answer:
        """Drop idle conversations: one, those idle for so long, or all."""
        wanted = asked.evict(await asked.body(request))
        return await asyncio.to_thread(engines.evict, self.engines, wanted)

    async def pin(self, request: Request) -> Answer:
        """Keep a conversation when room is made for others, or let it go."""
        wanted = asked.pin(await asked.body(request))
        found = await asyncio.to_thread(engines.pin, self.engines, wanted)
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
