"""The life of one running reply: read from the engine, saved as it grows, settled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace

from app.active import ActiveRequests, Origin
from app.errors import AppError, ReplyUnsaved
from app.job import Job
from app.metrics import Metrics
from app.ranks import Ranks
from app.supervisor import EngineSupervisor
from app.templating import Templating
from db.errors import Conflict, DbError, InvalidInput, NotFound, StorageUnavailable
from db.store import Store
from db.values import clean_text
from db.views import FinalStatus
from tangram.client import CompletionRequest, EngineClient
from tangram.errors import EngineRejected, EngineUnavailable

log = logging.getLogger(__name__)

ENGINE_GONE = (
    "The engine stopped while it was answering. What it had written is kept; regenerate to try again."
)

MAX_RETRY_SECONDS = 10.0
"""Longest pause between two attempts to save a reply that the database did not take."""


class ReplyRunner:
    """Runs jobs, many at a time.

    A reply whose end the database does not take is kept and tried again, with growing pauses, until `close`.

    Args:
        flush_seconds: how often a running reply is saved.
        forget: called when a job is in the database for good. Its watchers are told after that, or, when the
            database did not take it, before.
        active: knows what runs.
        ranks: knows in which of the engine's ranks a conversation lives.
    """

    def __init__(
        self,
        store: Store,
        supervisor: EngineSupervisor,
        metrics: Metrics,
        *,
        flush_seconds: float,
        forget: Callable[[Job], None],
        active: ActiveRequests | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._active = active if active is not None else ActiveRequests()
        self._ranks = ranks if ranks is not None else Ranks(supervisor, store)
        self.flush_seconds = flush_seconds
        self._store = store
        self._supervisor = supervisor
        self._metrics = metrics
        self._forget = forget
        self.retry_seconds = 0.5
        self._unsaved: dict[str, Job] = {}
        self._trying: set[asyncio.Task[None]] = set()

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
            if job.ticket is not None:
                job.ticket.leave()
        failure = None if reader.cancelled() else reader.exception()
        job.token_ids = templating.settle(job.token_ids)
        await self.settle(job, failure)

    async def _read(self, job: Job, engine: EngineClient, request: CompletionRequest) -> None:
        with self._active.begin(
            Origin(job.owner, job.conversation_id),
            tokens=lambda: len(job.token_ids),
            stop=lambda why: job.ask_to_end("stopped", why),
        ) as active:
            if job.ticket is not None:
                await job.ticket.turn()
            rank = await self._ranks.of_conversation(job.owner, job.conversation_id)
            job.facts |= self._ranks.facts(rank)
            active.at_engine = True
            named = replace(request, request_id=active.name, rank=rank)
            async with self._ranks.working(rank), contextlib.aclosing(engine.stream(named)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids and job.status == "pending":
                        job.status = "streaming"
                        await self._note_start(job)
                    job.take(chunk)

    async def _note_start(self, job: Job) -> None:
        """Store that it is being written. A database that is away now may be there at the first save."""
        try:
            await self._store.start_reply(job.owner, job.reply_id)
        except StorageUnavailable as error:
            log.warning("reply %s could not be marked as begun: %s", job.reply_id, error)

    async def _save(self, job: Job, templating: Templating) -> None:
        """Save the text so far. A disk that is full now may not be at the next try: the reply goes on."""
        try:
            await self._store.flush_reply(
                job.owner, job.reply_id, job.text, templating.settle(job.token_ids), job.measure(None)
            )
        except DbError as error:
            log.warning("reply %s could not be saved yet: %s", job.reply_id, error)

    async def settle(self, job: Job, failure: BaseException | None) -> None:
        """Give a job that runs no more its final status, in the database and for its watchers."""
        job.ending, job.error = _outcome(job, failure)
        job.status = job.ending
        if is_engines_fault(failure):
            self._supervisor.check_now()
        elif failure is not None and not isinstance(failure, EngineRejected | AppError):
            log.error("reply %s failed", job.reply_id, exc_info=failure)
        try:
            job.stats = job.measure(self._kept_fraction(job))
            job.unsaved = not await self._store_end(job, job.ending)
        finally:
            self._metrics.reply_ended(job.told[0], job.stats)
            if job.unsaved:
                self._try_later(job)
            else:
                self._forget(job)
            job.settled.set()
            job.notify()

    async def _store_end(self, job: Job, final: FinalStatus) -> bool:
        """Save the whole reply as `final`. False: the database does not take it now, but may later."""
        try:
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
        except (NotFound, Conflict, InvalidInput) as error:  # no later try would end otherwise
            if isinstance(error, Conflict) and await self._is_there(job, final):
                return True
            log.error("reply %s cannot be saved: %s", job.reply_id, error)  # noqa: TRY400 (the text says it all)
            job.status, job.error = "error", "The reply could not be saved. The server's log says why."
        except DbError as error:
            log.error("reply %s could not be saved yet: %s", job.reply_id, error)  # noqa: TRY400
            return False
        return True

    async def _is_there(self, job: Job, final: FinalStatus) -> bool:
        """Whether the end is stored already, by an earlier try whose outcome was not known."""
        try:
            stored = await self._store.get_message(job.owner, job.reply_id)
        except DbError:
            return False
        return (stored.status, stored.content) == (final, clean_text(job.text))

    # ---- replies that the database did not take ----------------------------------------------

    def _try_later(self, job: Job) -> None:
        self._unsaved[job.reply_id] = job
        task = asyncio.create_task(self._keep_trying(job), name=f"saving reply {job.reply_id}")
        self._trying.add(task)
        task.add_done_callback(self._trying.discard)

    async def _keep_trying(self, job: Job) -> None:
        pause = self.retry_seconds
        while job.unsaved:
            await asyncio.sleep(pause)
            pause = min(2 * pause, MAX_RETRY_SECONDS)
            await self._save_unsaved(job)

    async def _save_unsaved(self, job: Job) -> None:
        async with job.saving:
            if job.unsaved and job.ending is not None and await self._store_end(job, job.ending):
                job.unsaved = False
                del self._unsaved[job.reply_id]
                self._forget(job)
                log.info("reply %s is settled now", job.reply_id)

    async def ensure_saved(self, job: Job) -> None:
        """Save an ended reply that is still unsaved, now. Raises ReplyUnsaved when that fails again."""
        await self._save_unsaved(job)
        if job.unsaved:
            raise ReplyUnsaved

    async def close(self) -> None:
        """Try once more to save what is unsaved, then give up: the next start finds it interrupted."""
        for job in tuple(self._unsaved.values()):
            await self._save_unsaved(job)
        trying = tuple(self._trying)
        for task in trying:
            task.cancel()
        if trying:
            await asyncio.wait(trying)

    def _kept_fraction(self, job: Job) -> float | None:
        geometry = self._supervisor.geometry
        if geometry is None or not job.token_ids:
            return None
        return round(geometry.kept_fraction(job.prompt_tokens + len(job.token_ids)), 4)


def is_engines_fault(failure: BaseException | None) -> bool:
    """Whether a failed generation says that the engine may be dead."""
    if isinstance(failure, EngineRejected):
        return failure.status >= 500
    return isinstance(failure, EngineUnavailable)


def _outcome(job: Job, failure: BaseException | None) -> tuple[FinalStatus, str | None]:
    """(final status, error for the user) of a job whose reader has ended."""
    if job.finish_reason in ("stop", "length") and failure is None:
        return "complete", None
    if job.ending is not None:
        words = "The reply was interrupted: the server or its engine was restarted."
        return job.ending, words if job.ending == "interrupted" else None
    if isinstance(failure, AppError):
        return "error", failure.message
    if isinstance(failure, EngineRejected) and failure.status < 500:
        return "error", f"The engine refused the request: {failure.message}"
    if failure is None or isinstance(failure, EngineUnavailable | EngineRejected):
        return "error", ENGINE_GONE
    return "error", "The reply failed for a reason that the server's log names."
