"""Restarts and changes of model, as jobs of the app: a closed browser tab does not interrupt them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from time import monotonic

from admin.errors import TuneError
from app.errors import AppError

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineJob:
    """``outcome`` is ``None`` while it runs, then ``applied`` or ``failed``."""

    doing: str
    began: float
    outcome: str | None = None
    message: str = ""
    seconds: float = 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, or until the end."""
        return self.seconds if self.outcome else monotonic() - self.began


class EngineJobs:
    """One at a time."""

    def __init__(self, on_change: Callable[[], None] = lambda: None) -> None:
        self._on_change = on_change
        self._task: asyncio.Task[None] | None = None
        self.job: EngineJob | None = None

    def start(self, doing: str, done: str, work: Callable[[], Awaitable[None]]) -> EngineJob:
        """Begin; raises :class:`TuneError` while another one runs. ``done`` is what to say afterwards."""
        if self._task is not None and not self._task.done():
            raise TuneError("The engine is being changed already. Wait until that is done.")
        job = self.job = EngineJob(doing, monotonic())
        self._task = asyncio.create_task(self._run(job, done, work), name="engine job")
        return job

    async def stop(self) -> None:
        """Cancel what runs; the app is shutting down."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _run(self, job: EngineJob, done: str, work: Callable[[], Awaitable[None]]) -> None:
        outcome, message = "applied", done
        try:
            await work()
        except AppError as error:
            outcome, message = "failed", error.message
        except Exception as error:
            log.exception("%s failed", job.doing)
            outcome, message = "failed", f"It could not be completed: {error}"
        self.job = replace(job, outcome=outcome, message=message, seconds=job.elapsed)
        self._on_change()
