"""What the rest of the app knows of the engine: its state, its client, its model.

`app.managed_engine` runs the engine as a child process, `app.remote_engine` uses one that runs elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from app.errors import EngineNotReady, EngineStartFailed
from app.model_source import ServedModel, open_model
from app.moments import now_ms
from app.settings import Settings
from app.templating import Templating
from tangram.client import EngineClient
from tangram.errors import TangramError
from tangram.geometry import Geometry

Overrides = Mapping[str, float | int | str]
"""Engine options that win over the environment: {"retention": 0.5, "group_size": 16, "alpha": 1.0}."""


HELD = "nothing new is accepted"
"""Phase of an engine that an administrator drains without restarting it."""


class EngineState(StrEnum):
    STOPPED = "stopped"
    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A picture of the engine at one moment.

    phase: what it is doing, in words ("loading the model").
    detail: why it failed or restarts, "" if it did not.
    since: unix milliseconds of the last change of state.
    restarts: restarts after a death, since the app began.
    ready_seconds: how long the last start took.
    max_model_len: tokens of the context, 0 until known.
    stalled: it has work and does nothing, as somebody who watches it says.
    """

    state: EngineState = EngineState.STOPPED
    phase: str = ""
    detail: str = ""
    model: str = ""
    since: int = 0
    pid: int | None = None
    restarts: int = 0
    overrides: Overrides = field(default_factory=dict)
    ready_seconds: float | None = None
    max_model_len: int = 0
    stalled: bool = False

    @property
    def ready(self) -> bool:
        return self.state is EngineState.READY


class EngineSupervisor(ABC):
    """Keeps one engine. Made before the event loop runs; `start` and `stop` belong to the app's lifespan.

    ranks: how many data parallel ranks the engine that was last ready has, each with a cache of its own
        (app.ranks).
    """

    drain: Callable[[], Awaitable[None]] | None = None
    """Called before a wanted restart stops the engine: wait for running replies, then settle the rest."""

    def __init__(self, settings: Settings, *, progress: Callable[[str], None] = lambda line: None) -> None:
        self.settings = settings
        self.geometry: Geometry | None = None
        self.ranks = 1
        self._progress = progress
        self._status = EngineStatus(since=now_ms())
        self._changed = asyncio.Event()
        self._suspected = asyncio.Event()
        self._client: EngineClient | None = None
        self._model: ServedModel | None = None

    # ---- looking -----------------------------------------------------------------------------

    @property
    def status(self) -> EngineStatus:
        return self._status

    @property
    def client(self) -> EngineClient:
        """The client of the engine that is ready. Raises EngineNotReady."""
        if self._client is None or not self._status.ready:
            raise self.not_ready()
        return self._client

    @property
    def watching(self) -> EngineClient:
        """The client, for looking only: also while nothing new is accepted. Raises EngineNotReady."""
        if self._client is None or not (self._status.ready or self.held):
            raise self.not_ready()
        return self._client

    @property
    def held(self) -> bool:
        """Whether an administrator has it accept nothing new."""
        return self._status.state is EngineState.DRAINING and self._status.phase == HELD

    @property
    def templating(self) -> Templating:
        """Tokenizer and template of the served model. Raises EngineNotReady until they are loaded."""
        if self._model is None:
            raise self.not_ready()
        return self._model.templating

    @property
    def model_source(self) -> str:
        """The served model's directory or hub id. Raises EngineNotReady until it is found."""
        if self._model is None:
            raise self.not_ready()
        return self._model.source

    @property
    def max_reply_tokens(self) -> int:
        """Tokens of a reply of the served model where nobody names a number."""
        return self.settings.reply_tokens(self._model is not None and self._model.bundled)

    def not_ready(self) -> EngineNotReady:
        """The error that says, in words for the user, what the engine is doing instead of answering."""
        status = self._status
        if status.state is EngineState.FAILED:
            return EngineNotReady(
                f"The engine does not start: {status.detail} An administrator has to look.", 60
            )
        if self.held:
            return EngineNotReady("The engine accepts nothing new for now: an administrator works on it.", 60)
        words = {
            EngineState.DRAINING: "The engine is about to restart with other settings",
            EngineState.RESTARTING: "The engine stopped and is being restarted",
            EngineState.STOPPED: "The engine is not running",
        }.get(status.state, "The engine is starting")
        return EngineNotReady(
            f"{words}{f' ({status.phase})' if status.phase else ''}. Try again in a moment."
        )

    async def wait_ready(self) -> None:
        """Return when the engine is ready. Raises EngineStartFailed when it gives up."""
        while not self._status.ready:
            if self._status.state is EngineState.FAILED:
                raise EngineStartFailed(self._status.detail)
            await self.changed()

    async def changed(self) -> None:
        """Return at the next change of `status`."""
        await self._changed.wait()

    def check_now(self) -> None:
        """Somebody's request failed: look at once whether the engine is well, not at the next turn."""
        self._suspected.set()

    def log_tail(self, lines: int = 100) -> list[str]:
        """The last lines of the engine's log, without secrets; empty for an engine that runs elsewhere."""
        return []

    # ---- doing -------------------------------------------------------------------------------

    @abstractmethod
    async def start(self, overrides: Overrides | None = None) -> None:
        """Begin to bring the engine up and return at once; `status` tells how it goes."""

    @abstractmethod
    async def restart(self, overrides: Overrides, model: str | None = None) -> None:
        """Drain, restart with `overrides`, and with another model if one is named; return when ready.

        Raises EngineStartFailed when the engine does not come up; the previous overrides and model are then
        in force again (`rolled_back`: and the engine runs with them).
        """

    def choose_model(self, model: str) -> None:
        """What to serve; before `start` only."""
        self.settings = self.settings.model_copy(update={"model": model})

    def hold(self) -> None:
        """Accept nothing new; what runs goes on."""
        if self._status.ready:
            self._set(EngineState.DRAINING, phase=HELD)

    def release(self) -> None:
        """Accept again."""
        if self.held:
            self._set(EngineState.READY, phase="")

    def report_stall(self, stalled: bool) -> None:
        """Whoever watches the engine says whether it has work and does nothing."""
        if stalled != self._status.stalled:
            self._set(stalled=stalled)

    def condemn(self, reason: str) -> None:
        """It will not recover: replace it, where it is ours to replace. Here it is not."""
        self.check_now()

    @abstractmethod
    async def stop(self) -> None:
        """Stop the engine and everything started here."""

    # ---- shared ------------------------------------------------------------------------------

    def _set(self, state: EngineState | None = None, **changes: Any) -> None:
        if state is not None and state is not self._status.state:
            changes |= {"state": state, "since": now_ms()}
        updated = replace(self._status, **changes)
        if updated == self._status:
            return
        self._status = updated
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _suspicion(self, seconds: float) -> None:
        """Return when somebody suspects the engine, at the latest after some seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._suspected.wait()
        self._suspected.clear()

    def _phase(self, phase: str) -> None:
        if phase != self._status.phase:
            self._set(phase=phase)
            self._progress(f"engine: {phase}")

    async def _open_model(self) -> ServedModel:
        if self._model is None:
            self._model = await open_model(self.settings, self._phase)
            self._set(model=self._model.name)
        return self._model

    async def _became_ready(
        self, client: EngineClient, name: str, max_model_len: int, seconds: float
    ) -> None:
        own = not self.settings.engine_url  # how many another one has, it alone can tell
        self.geometry, self.ranks = None, self.settings.data_parallel_size if own else 1
        try:
            memory = await client.memory()
            self.geometry = Geometry.from_dict(memory["geometry"])
            self.ranks = max(1, len(memory["engines"]))
        except (TangramError, KeyError):
            pass  # an engine without the memory endpoint can still chat
        self._set(
            EngineState.READY,
            phase="",
            detail="",
            stalled=False,
            model=name,
            max_model_len=max_model_len,
            ready_seconds=seconds,
        )
        self._progress(f"engine: ready in {seconds:.1f} s, {name}, {max_model_len} tokens of context")

    async def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()
