"""An engine that somebody else runs: watched, never started or stopped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from app.errors import EngineStartFailed, ModelUnusable
from app.settings import Settings
from app.supervisor import EngineState, EngineSupervisor, Overrides
from app.templating import Templating
from tangram.client import EngineClient
from tangram.errors import TangramError

_POLL_STARTING = 0.2
_POLL_READY = 2.0


class RemoteEngine(EngineSupervisor):
    """Watches the engine at `settings.engine_url`."""

    def __init__(self, settings: Settings, *, progress: Callable[[str], None] = lambda line: None) -> None:
        super().__init__(settings, progress=progress)
        self._task: asyncio.Task[None] | None = None

    async def start(self, overrides: Overrides | None = None) -> None:
        self._set(EngineState.STARTING, phase=f"waiting for the engine at {self.settings.engine_url}")
        self._client = EngineClient(self.settings.engine_url, api_key=self.settings.engine_api_key or None)
        self._task = asyncio.create_task(self._watch(self._client), name="remote engine")

    async def restart(self, overrides: Overrides, model: str | None = None) -> None:
        raise EngineStartFailed(
            "This engine runs outside the app: restart it there, with the options you want."
        )

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._drop_client()
        self._set(EngineState.STOPPED, phase="")

    async def _watch(self, client: EngineClient) -> None:
        try:
            await self._open_model()
        except ModelUnusable as error:
            self._set(EngineState.FAILED, phase="", detail=error.message)
            self._progress(f"engine: {error.message}")
            return
        began = time.monotonic()
        while True:
            if await client.health():
                if not self._status.ready:
                    await self._greet(client, began)
            elif self._status.ready:
                began = time.monotonic()
                self._set(
                    EngineState.RESTARTING,
                    restarts=self._status.restarts + 1,
                    phase="waiting for it to come back",
                    detail="The engine does not answer.",
                )
                self._progress("engine: it does not answer any more")
            await self._suspicion(_POLL_READY if self._status.ready else _POLL_STARTING)

    async def _greet(self, client: EngineClient, began: float) -> None:
        try:
            served = (await client.models())[0]
        except (TangramError, IndexError):
            return
        name = str(served["id"])
        if self._model is not None and self._model.name != name:
            # Message segments are marked with the served name; the tokenizer is the configured model's.
            templating = Templating(name, self._model.templating.text)
            self._model = replace(self._model, name=name, templating=templating)
        await self._became_ready(
            client, name, int(served.get("max_model_len") or 0), time.monotonic() - began
        )
