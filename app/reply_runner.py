"""The life of one running reply: read from the engine, saved as it grows, settled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from app.job import Job
from app.metrics import Metrics
from app.supervisor import EngineSupervisor
from app.templating import Templating
from db.errors import DbError
from db.store import Store
from db.views import FinalStatus
from tangram.client import CompletionRequest, EngineClient
from tangram.errors import EngineRejected, EngineUnavailable

log = logging.getLogger(__name__)

ENGINE_GONE = (
    "The engine stopped while it was answering. What it had written is kept; regenerate to try again."
)


class ReplyRunner:
    """Runs jobs, many at a time.

    Args:
        flush_seconds: how often a running reply is saved.
        forget: called when a job is in the database for good, before its watchers are told.
    """

    def __init__(
        self,
        store: Store,
        supervisor: EngineSupervisor,
        metrics: Metrics,
        *,
        flush_seconds: float,
        forget: Callable[[Job], None],
    ) -> None:
        self.flush_seconds = flush_seconds
        self._store = store
        self._supervisor = supervisor
        self._metrics = metrics
        self._forget = forget

    async def run(
        self, job: Job, engine: EngineClient, request: CompletionRequest, templating: Templating
    ) -> None:
        """Ask the engine, save what comes about once a second, and settle the reply however it ends."""
        reader = asyncio.create_task(self._read(job, engine, request))
        ended = asyncio.create_task(job.end.wait())
        try:
            saved = 0
            while True:
                done, _ = await asyncio.wait(
                    {reader, ended}, timeout=self.flush_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                if done:
                    break
                if len(job.token_ids) > saved:
                    saved = len(job.token_ids)
                    await self._save(job, templating)
        finally:
            for task in (reader, ended):
                task.cancel()
            await asyncio.wait({reader, ended})
        await self._settle(job, reader, templating)

    async def _read(self, job: Job, engine: EngineClient, request: CompletionRequest) -> None:
        async with contextlib.aclosing(engine.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.token_ids and job.status == "pending":
                    job.status = "streaming"
                    await self._store.start_reply(job.owner, job.reply_id)
                job.take(chunk)

    async def _save(self, job: Job, templating: Templating) -> None:
        """Save the text so far. A disk that is full now may not be at the next try: the reply goes on."""
        try:
            await self._store.flush_reply(
                job.owner, job.reply_id, job.text, templating.settle(job.token_ids), job.measure(None)
            )
        except DbError as error:
            log.warning("reply %s could not be saved yet: %s", job.reply_id, error)

    async def _settle(self, job: Job, reader: asyncio.Task[None], templating: Templating) -> None:
        failure = None if reader.cancelled() else reader.exception()
        final, job.error = _outcome(job, failure)
        job.status = final
        if failure is not None and not isinstance(failure, EngineUnavailable | EngineRejected):
            log.error("reply %s failed", job.reply_id, exc_info=failure)
        try:
            job.token_ids = templating.settle(job.token_ids)
            job.stats = job.measure(self._kept_fraction(job))
            await self._store.finish_reply(
                job.owner,
                job.reply_id,
                final,
                job.text,
                job.token_ids,
                job.stats,
                finish_reason=job.finish_reason,
                error=job.error,
            )
        except DbError as error:
            log.error("reply %s could not be saved: %s", job.reply_id, error)  # noqa: TRY400 (the text says it all)
            job.status, job.error = "error", "The reply could not be saved. Is the disk full?"
        finally:
            self._metrics.reply_ended(job.status, job.stats)
            self._forget(job)
            job.settled.set()
            job.notify()

    def _kept_fraction(self, job: Job) -> float | None:
        geometry = self._supervisor.geometry
        if geometry is None or not job.token_ids:
            return None
        return round(geometry.kept_fraction(job.prompt_tokens + len(job.token_ids)), 4)


def _outcome(job: Job, failure: BaseException | None) -> tuple[FinalStatus, str | None]:
    """(final status, error for the user) of a job whose reader has ended."""
    if job.finish_reason in ("stop", "length") and failure is None:
        return "complete", None
    if job.ending is not None:
        words = "The reply was interrupted: the server or its engine was restarted."
        return job.ending, words if job.ending == "interrupted" else None
    if isinstance(failure, EngineRejected) and failure.status < 500:
        return "error", f"The engine refused the request: {failure.message}"
    if failure is None or isinstance(failure, EngineUnavailable | EngineRejected):
        return "error", ENGINE_GONE
    return "error", "The reply failed for a reason that the server's log names."
