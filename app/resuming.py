"""Replies that a restart interrupted go on by themselves, when there is an engine again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from app.errors import ConversationBusy, EngineNotReady, EngineStartFailed
from app.job import RESUMED, Job
from app.reply_runner import ReplyRunner
from app.supervisor import EngineSupervisor
from app.templating import Templating
from db.errors import DbError
from db.store import Store
from db.views import MessageView
from tangram.client import CompletionRequest, EngineClient

log = logging.getLogger(__name__)

MOST_RESUMPTIONS = 3
"""A reply that took part in so many ends of the app may have caused them: then it stays interrupted."""
RESUME_WITHIN_SECONDS = 3600.0

Prepare = Callable[[Job], Awaitable[tuple[EngineClient, CompletionRequest, Templating]]]
Start = Callable[[Job, Callable[[], Coroutine[Any, Any, None]]], Awaitable[None]]


class Resumption:
    """Makes jobs of interrupted replies. Each waits for the engine; meanwhile it can be watched and stopped.

    Args:
        prepare: what to ask the engine for a job; raises EngineNotReady when there is none now.
        start: reopens a job's reply with the job's stats and runs its work; raises ConversationBusy, DbError.
    """

    def __init__(
        self,
        store: Store,
        supervisor: EngineSupervisor,
        runner: ReplyRunner,
        prepare: Prepare,
        start: Start,
    ) -> None:
        self._store = store
        self._supervisor = supervisor
        self._runner = runner
        self._prepare = prepare
        self._start = start

    async def resume_all(self) -> int:
        """Resume what was interrupted lately; how many replies that are."""
        since = round((time.time() - RESUME_WITHIN_SECONDS) * 1000)
        count = 0
        for reply in await self._store.resumable_replies(since):
            count += await self.resume(reply)
        return count

    async def resume(self, reply: MessageView) -> bool:
        """Resume one reply. False: it stays interrupted."""
        tries = reply.stats.get(RESUMED, 0)
        if not isinstance(tries, int) or tries >= MOST_RESUMPTIONS:
            return False
        job = Job.going_on(reply)
        job.facts[RESUMED] = job.stats[RESUMED] = tries + 1
        try:
            await self._start(job, lambda: self._run(job))
        except (DbError, ConversationBusy) as error:
            log.warning("reply %s cannot go on: %s", reply.id, error)
            return False
        return True

    async def _run(self, job: Job) -> None:
        while await self._engine_is_there(job):
            try:
                engine, request, templating = await self._prepare(job)
            except EngineNotReady:
                continue  # it went down again
            except Exception as error:  # whatever it is, the reply must not stay open
                await self._runner.settle(job, error)
                return
            await self._runner.run(job, engine, request, templating)
            return
        await self._runner.settle(job, None)

    async def _engine_is_there(self, job: Job) -> bool:
        """Wait for the engine. False when the job is to end first, or the engine has been given up."""
        ready = asyncio.create_task(self._supervisor.wait_ready())
        ended = asyncio.create_task(job.end.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if job.end.is_set():
                return False
            ready.result()
        except EngineStartFailed:
            job.ask_to_end("interrupted")
            return False
        finally:
            for task in (ready, ended):
                task.cancel()
            await asyncio.wait({ready, ended})
        return True
