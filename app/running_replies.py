"""The replies that are being written in this process, who follows them, and where a turn is being stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any

from app.errors import Busy, ConversationBusy
from app.events import Event
from app.job import Job

MOST_FOLLOWERS = 16
"""Pages and streams that may follow one reply, all of them its owner's."""


class RunningReplies:
    """Jobs by the id of their reply. Every look-up names the owner: a stranger's ids are not found."""

    def __init__(self) -> None:
        self._jobs: dict[str, Job] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._claimed: dict[tuple[str, str], asyncio.Event] = {}
        self._followers: Counter[str] = Counter()

    def all(self) -> tuple[Job, ...]:
        """Everybody's, those that could not be saved yet included."""
        return tuple(self._jobs.values())

    def find(self, owner: str, reply_id: str) -> Job | None:
        """The job of a reply; None when it is finished, somebody else's or unknown."""
        job = self._jobs.get(reply_id)
        return job if job is not None and job.owner == owner else None

    def of(self, owner: str, conversation_id: str) -> list[Job]:
        """The jobs in a conversation."""
        return [
            job
            for job in self._jobs.values()
            if job.conversation_id == conversation_id and job.owner == owner
        ]

    def written(self, owner: str, conversation_id: str) -> str | None:
        """Id of the reply being written in a conversation, if any."""
        return next((job.reply_id for job in self.of(owner, conversation_id) if not job.unsaved), None)

    @property
    def active(self) -> int:
        """How many are being written."""
        return sum(not job.unsaved for job in self._jobs.values())

    # ---- beginning and ending ----------------------------------------------------------------

    @contextlib.contextmanager
    def claim(self, owner: str, conversation_id: str) -> Iterator[list[Job]]:
        """One reply at a time in a conversation, from the first look until it has begun or was refused.

        By owner too: a stranger who names the conversation neither learns of it nor blocks it. Yields the
        jobs there, all of which have ended unsaved. Raises ConversationBusy.
        """
        claim = (owner, conversation_id)
        if claim in self._claimed or self.written(owner, conversation_id):
            raise ConversationBusy
        released = self._claimed[claim] = asyncio.Event()
        try:
            yield self.of(owner, conversation_id)
        finally:
            del self._claimed[claim]
            released.set()

    def start(self, job: Job, work: Coroutine[Any, Any, None]) -> None:
        """Run a job's work; `forget` ends it."""
        self._jobs[job.reply_id] = job
        task = asyncio.create_task(work, name=f"reply {job.reply_id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def forget(self, job: Job) -> None:
        """It is stored for good."""
        if self._jobs.get(job.reply_id) is job:
            del self._jobs[job.reply_id]

    async def claims_released(self) -> None:
        """Return when each turn that was being stored either has its job or was refused."""
        for released in tuple(self._claimed.values()):
            await released.wait()

    async def ended(self, seconds: float | None = None) -> None:
        """Return when all that run have ended, or after some seconds."""
        if self._tasks:
            await asyncio.wait(tuple(self._tasks), timeout=seconds)

    async def interrupt_all(self) -> None:
        """Have all end soon as interrupted; return when they have."""
        for job in self.all():
            job.ask_to_end("interrupted")
        await self.ended()

    # ---- following ---------------------------------------------------------------------------

    def check_follow(self, reply_id: str) -> None:
        """Raise Busy when no more may follow a reply."""
        if self._followers[reply_id] >= MOST_FOLLOWERS:
            raise Busy(
                f"This reply is followed in {MOST_FOLLOWERS} places already. Close some of the pages or "
                "streams that show it.",
                5,
            )

    async def follow(self, job: Job, after: int) -> AsyncGenerator[Event, None]:
        """The events of a job from character `after` on. Raises Busy at the first step."""
        self.check_follow(job.reply_id)
        self._followers[job.reply_id] += 1
        try:
            async with contextlib.aclosing(job.watch(after)) as events:
                async for event in events:
                    yield event
        finally:
            self._followers[job.reply_id] -= 1
            if not self._followers[job.reply_id]:
                del self._followers[job.reply_id]
