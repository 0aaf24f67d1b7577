"""Changes of the engine (settings, profile, model, a plain restart) as jobs of the app, one at a time.

Each drains, restarts, checks and, if need be, goes back (`app.engine_settings`); a closed browser tab
interrupts none. Begin and end are in the app's log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from app.errors import AlreadyRunning, AppError

log = logging.getLogger(__name__)

SETTINGS, PROFILE, MODEL, RESTART = "settings", "profile", "model", "restart"


@dataclass(frozen=True)
class EngineChange:
    """kind: what is changed; to: into what, in words.

    outcome: None while it runs, then "applied" or "failed".
    """

    kind: str
    to: str
    began: float
    outcome: str | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, or until the end."""
        return self.seconds if self.outcome else time.monotonic() - self.began


class EngineChanges:
    """One per process. on_change: told whenever one has ended."""

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._last: dict[str, EngineChange] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether one runs now."""
        return self._task is not None and not self._task.done()

    def refuse_while_running(self) -> None:
        """Raise AlreadyRunning while one runs."""
        if self.running:
            raise AlreadyRunning("The engine is being changed already. Wait until that is done.")

    def last(self, *kinds: str) -> EngineChange | None:
        """The latest of these kinds, running or ended."""
        found = [self._last[kind] for kind in kinds if kind in self._last]
        return max(found, key=lambda change: change.began, default=None)

    def start(self, kind: str, to: str, work: Callable[[], Awaitable[str]]) -> EngineChange:
        """Begin. `work` returns what to say when it is applied. Raises AlreadyRunning while one runs."""
        self.refuse_while_running()
        change = self._last[kind] = EngineChange(kind, to, time.monotonic())
        log.info("engine: changing its %s: %s", kind, to)
        self._task = asyncio.create_task(self._run(change, work), name=f"engine {kind}")
        return change

    async def wait(self, seconds: float | None = None) -> None:
        """Return after at most `seconds`, or as soon as none runs."""
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=seconds)

    async def close(self) -> None:
        """Cancel what runs; the app is shutting down."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def _run(self, change: EngineChange, work: Callable[[], Awaitable[str]]) -> None:
        try:
            outcome, message = "applied", await work()
        except AppError as error:
            outcome, message = "failed", error.message
        except Exception as error:
            log.exception("changing the engine's %s failed", change.kind)
            outcome, message = "failed", f"The change could not be completed and is not stored: {error}"
        ended = self._last[change.kind] = replace(
            change, outcome=outcome, message=message, seconds=change.elapsed
        )
        level = logging.INFO if outcome == "applied" else logging.WARNING
        log.log(level, "engine: %s, after %.0f s: %s", outcome, ended.seconds, message)
        self.on_change()
