"""Replies as jobs of the app: started, watched, stopped and settled here, whoever is connected.

The user's message and an empty reply are in the database before the engine is asked. While the engine writes,
the text and the token ids are saved about once a second. A reader that goes away only detaches; only `stop`,
a restart of the engine and the end of the app abort a reply, and each leaves its text with a final status.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

from app.active import ActiveRequests
from app.context import LEFT_OUT, STARTS_AT, Branch, ContextMeter, can_continue, measured, meter
from app.errors import AccessEnded, BadRequest, EngineNotReady
from app.events import Event, ReplyHandle, Sampling
from app.fairness import FairQueue, Ticket
from app.job import Job, replay
from app.metrics import Metrics
from app.prompting import Prompting, draft, with_ids
from app.ranks import Ranks
from app.reply_runner import ReplyRunner
from app.resuming import Resumption
from app.running_replies import RunningReplies
from app.supervisor import EngineSupervisor
from app.templating import Templating
from app.tokenising import Tokenising
from db.errors import DbError, NotFound
from db.store import Store
from db.views import ConversationView, MessageView
from tangram.client import CompletionRequest, EngineClient

MAX_CONTENT = 400_000
"""Characters of one message."""


class GenerationService:
    """All running replies of this process.

    Args:
        flush_seconds: how often a running reply is saved.
        drain_seconds: what a reply gets to finish before a wanted restart of the engine interrupts it.
        resume_replies: whether replies that a restart interrupted go on by themselves.
        active: knows what runs.
        tokenising: where text becomes token ids.
        ranks: in which of the engine's ranks a conversation lives.
    """

    def __init__(
        self,
        store: Store,
        supervisor: EngineSupervisor,
        metrics: Metrics,
        queue: FairQueue,
        *,
        flush_seconds: float = 1.0,
        drain_seconds: float = 10.0,
        resume_replies: bool = True,
        active: ActiveRequests | None = None,
        tokenising: Tokenising | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self._tokenising = tokenising or Tokenising()
        self._jobs = RunningReplies()
        self._store = store
        self._supervisor = supervisor
        self._queue = queue
        self._active = active if active is not None else ActiveRequests()
        self._runner = ReplyRunner(
            store,
            supervisor,
            metrics,
            flush_seconds=flush_seconds,
            forget=self._jobs.forget,
            active=self._active,
            ranks=ranks,
        )
        self._resumption = Resumption(store, supervisor, self._runner, self._prepare, self._take_in)
        self._prompting = Prompting(store, supervisor, self._tokenising)
        self._resume_replies = resume_replies
        queue.on_move = self.notify_waiting
        self._drain_seconds = drain_seconds
        self._closing = False
        supervisor.drain = self.drain

    # ---- beginning a reply -------------------------------------------------------------------

    async def send(
        self,
        owner: str,
        conversation_id: str,
        content: str,
        parent_id: str | None = None,
        sampling: Sampling | None = None,
    ) -> ReplyHandle:
        """Commit the user's message and an empty reply, start the reply, return both.

        parent_id: the reply to answer; default the active leaf.
        Raises NotFound (db), EngineNotReady, ContextTooLong, ConversationBusy, Busy (too many requests),
        ReplyUnsaved (disk full), BadRequest (empty content); nothing is stored in these cases, so a page can
        keep its text.
        """
        async with self._claim(owner, conversation_id):
            conversation = await self._store.get_conversation(owner, conversation_id)
            path = await self._store.path(owner, conversation_id, parent_id)
            if path and path[-1].role == "assistant":
                path[-1] = await self._settled(path[-1])
            return await self._turn(owner, conversation, path, content, sampling)

    async def edit(
        self,
        owner: str,
        conversation_id: str,
        user_message_id: str,
        content: str,
        sampling: Sampling | None = None,
    ) -> ReplyHandle:
        """A new sibling of the user's message with other text, and a reply to it. Raises as `send`."""
        async with self._claim(owner, conversation_id):
            conversation = await self._store.get_conversation(owner, conversation_id)
            path = await self._store.path(owner, conversation_id, user_message_id)
            if path[-1].role != "user":
                raise BadRequest("Only your own messages can be edited.", param="message_id")
            return await self._turn(owner, conversation, path[:-1], content, sampling)

    async def regenerate(
        self, owner: str, conversation_id: str, reply_id: str, sampling: Sampling | None = None
    ) -> ReplyHandle:
        """A new sibling of the reply, from the same user message. Raises as `send`."""
        async with self._claim(owner, conversation_id):
            conversation = await self._store.get_conversation(owner, conversation_id)
            path = await self._store.path(owner, conversation_id, reply_id)
            if path[-1].role != "assistant":
                raise BadRequest("Only replies can be regenerated.", param="reply_id")
            engine, templating = self._ready()
            self._queue.admit(owner)
            *before, user, old = path
            if old.model != templating.model_name:  # its ids are another model's
                ids = await self._tokenising.run(
                    owner, templating.user_segment, before, conversation.system_prompt, user.content
                )
                await self._store.set_user_tokens(owner, user.id, ids)
                user = with_ids(user, ids)
            branch = Branch([*before, user], conversation.system_prompt, old)
            request, window = await self._prompting.request(conversation, templating, branch, sampling)
            with self._place(owner) as ticket:
                reply = await self._store.add_reply(owner, conversation_id, user.id, templating.model_name)
                job = Job.of(reply, len(request.prompt), window.facts, ticket)
                self._begin(job, engine, request, templating)
            return ReplyHandle(user, reply)

    async def continue_reply(
        self, owner: str, conversation_id: str, reply_id: str, sampling: Sampling | None = None
    ) -> ReplyHandle:
        """Let a reply that was cut short go on, in its place: its text stays and grows.

        Raises as `send`; BadRequest when the model had finished it, Conflict (db) when messages follow it.
        """
        async with self._claim(owner, conversation_id):
            conversation = await self._store.get_conversation(owner, conversation_id)
            path = await self._store.path(owner, conversation_id, reply_id)
            if not can_continue(path[-1]):
                raise BadRequest("This reply is finished: there is nothing to continue.", param="reply_id")
            engine, templating = self._ready()
            self._queue.admit(owner)
            job = Job.going_on(path[-1])
            request = await self._go_on(job, conversation, path, templating, sampling)
            with self._place(owner) as ticket:
                reply = await self._store.reopen_reply(owner, reply_id)
                job.ticket = ticket
                self._begin(job, engine, request, templating)
            return ReplyHandle(path[-2], reply)

    async def _go_on(
        self,
        job: Job,
        conversation: ConversationView,
        path: Sequence[MessageView],
        templating: Templating,
        sampling: Sampling | None = None,
        spent: int = 0,
    ) -> CompletionRequest:
        """What to ask so that the last reply of a path goes on. The job is told what it begins with.

        spent: tokens that the reply already has of those that it may have.
        """
        written = await self._tokenising.run(job.owner, templating.unfinished, path[-1])
        branch = Branch([*path[:-1], with_ids(path[-1], written)], conversation.system_prompt)
        request, window = await self._prompting.request(
            conversation, templating, branch, sampling, spent=spent
        )
        job.aim(written, len(request.prompt), window.facts)
        return request

    # ---- going on after a restart ------------------------------------------------------------

    async def resume_interrupted(self) -> int:
        """Let the replies that the end of the last run interrupted go on; how many there are.

        They wait for the engine as running replies do; whoever opens them follows them.
        """
        return await self._resumption.resume_all() if self._resume_replies else 0

    async def _prepare(self, job: Job) -> tuple[EngineClient, CompletionRequest, Templating]:
        engine, templating = self._ready()
        conversation = await self._store.get_conversation(job.owner, job.conversation_id)
        path = await self._store.path(job.owner, job.conversation_id, job.reply_id)
        spent = len(path[-1].token_ids)
        request = await self._go_on(job, conversation, path, templating, spent=spent)
        job.ticket = self._queue.rejoin(job.owner)
        return engine, request, templating

    async def _take_in(self, job: Job, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async with self._claim(job.owner, job.conversation_id):
            await self._store.reopen_reply(job.owner, job.reply_id, job.stats)
            self._jobs.start(job, work())

    async def _turn(
        self,
        owner: str,
        conversation: ConversationView,
        path: Sequence[MessageView],
        content: str,
        sampling: Sampling | None,
    ) -> ReplyHandle:
        if not content.strip():
            raise BadRequest("The message is empty.", param="content")
        if len(content) > MAX_CONTENT:
            raise BadRequest(f"The message is longer than {MAX_CONTENT} characters.", param="content")
        if path and path[-1].role != "assistant":
            raise BadRequest("A message answers a reply: name a reply as its parent.", param="parent_id")
        engine, templating = self._ready()
        self._queue.admit(owner)
        limit, system_prompt = self._supervisor.status.max_model_len, conversation.system_prompt
        templating.text.check_length(len(system_prompt), limit, "system prompt")
        templating.text.check_length(len(content), limit, "message")
        segment = await self._tokenising.run(owner, templating.user_segment, path, system_prompt, content)
        message = with_ids(draft(conversation, path, content), segment)
        branch = Branch([*path, message], conversation.system_prompt)
        request, window = await self._prompting.request(conversation, templating, branch, sampling)
        with self._place(owner) as ticket:
            user, reply = await self._store.add_turn(
                owner, conversation.id, path[-1].id if path else None, content, segment, templating.model_name
            )
            facts = window.facts
            if facts.get(STARTS_AT) == message.id:
                facts[STARTS_AT] = user.id
            self._begin(Job.of(reply, len(request.prompt), facts, ticket), engine, request, templating)
        return ReplyHandle(user, reply)

    def _ready(self) -> tuple[EngineClient, Templating]:
        if self._closing:
            raise EngineNotReady("The server is shutting down.")
        return self._supervisor.client, self._supervisor.templating

    @contextlib.contextmanager
    def _place(self, owner: str) -> Iterator[Ticket]:
        """A place in the queue, taken before anything is stored and given back if that fails. Raises Busy."""
        ticket = self._queue.join(owner)
        try:
            yield ticket
        except BaseException:
            ticket.leave()
            raise

    @contextlib.asynccontextmanager
    async def _claim(self, owner: str, conversation_id: str) -> AsyncIterator[None]:
        """One reply at a time in a conversation, from the first look until the reply's end is stored."""
        with self._jobs.claim(owner, conversation_id) as unsaved:
            for job in unsaved:
                await self._runner.ensure_saved(job)
            yield

    # ---- watching and stopping ---------------------------------------------------------------

    async def subscribe(self, owner: str, reply_id: str, after: int = 0) -> AsyncGenerator[Event, None]:
        """Events of a reply from character `after` on; ends after `done`. Closing it only detaches.

        Works for finished replies too (snapshot, done). Raises NotFound (db), and Busy where too many follow
        it already, at the first step.
        """
        job = self._jobs.find(owner, reply_id)
        events = self._jobs.follow(job, after) if job else replay(await self._reply(owner, reply_id), after)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event

    def check_follow(self, owner: str, reply_id: str) -> None:
        """Raise Busy when `subscribe` would; for those who must know before they begin an answer."""
        if self._jobs.find(owner, reply_id) is not None:
            self._jobs.check_follow(reply_id)

    async def stop(self, owner: str, reply_id: str) -> None:
        """Abort the reply in the engine and settle it as stopped, its text kept. No-op when it is finished.

        Returns when it is settled. Raises NotFound (db), ReplyUnsaved when the database does not take it, and
        ConversationBusy for one that nobody writes while another one of the conversation is written.
        """
        job = self._jobs.find(owner, reply_id)
        if job is None:
            reply = await self._reply(owner, reply_id)
            if not reply.is_final:
                async with self._claim(owner, reply.conversation_id):
                    await self._settled(await self._reply(owner, reply_id))
            return
        job.ask_to_end("stopped")
        await job.settled.wait()
        await self._runner.ensure_saved(job)

    async def _settled(self, reply: MessageView) -> MessageView:
        """A stored reply, under the claim of its conversation, so that nobody writes it: one that is not
        final had begun with a write whose outcome was not known, and ends here."""
        if reply.is_final:
            return reply
        return await self._store.finish_reply(
            reply.user_id, reply.id, "stopped", reply.content, reply.token_ids, reply.stats
        )

    async def stop_owner(self, owner: str) -> None:
        """Stop whatever is being written for a user, stored or not; for one who was shut out."""
        jobs = [job for job in self._jobs.all() if job.owner == owner]
        for job in jobs:
            job.ask_to_end("stopped", AccessEnded())
        self._active.stop_owner(owner)
        for job in jobs:
            await job.settled.wait()

    async def stop_conversation(self, owner: str, conversation_id: str) -> None:
        """Stop whatever is being written in a conversation; to be called before it is deleted."""
        if reply_id := self.running(owner, conversation_id):
            await self.stop(owner, reply_id)

    def position(self, owner: str, reply_id: str) -> int | None:
        """Place of a reply in the queue: 1 is next; None when it is being written, finished or unknown."""
        job = self._jobs.find(owner, reply_id)
        return job.position if job is not None else None

    def notify_waiting(self) -> None:
        """Tell those who watch replies without a token yet that positions in the queue have changed."""
        for job in self._jobs.all():
            if job.first_token is None:
                job.notify()

    def growing_context(self, owner: str, reply_id: str) -> ContextMeter | None:
        """How full the context is of a reply that is being written; None when it is not.

        It is what `context` tells, from what is known here: nothing is read or tokenised.
        """
        job = self._jobs.find(owner, reply_id)
        if job is None:
            return None
        tokens = job.prompt_tokens + len(job.token_ids)
        left_out, starts_at = job.facts.get(LEFT_OUT, 0), job.facts.get(STARTS_AT)
        limit = self._supervisor.status.max_model_len
        return measured(tokens, limit, self._supervisor.geometry, left_out, starts_at)

    async def context(self, owner: str, conversation_id: str, leaf_id: str | None = None) -> ContextMeter:
        """How full a branch's context is (default: the active one). Raises NotFound (db), EngineNotReady."""
        conversation = await self._store.get_conversation(owner, conversation_id)
        path = await self._store.path(owner, conversation_id, leaf_id)
        job = self._jobs.find(owner, path[-1].id) if path else None
        unsaved = max(0, len(job.token_ids) - len(path[-1].token_ids)) if job is not None else 0
        status, geometry = self._supervisor.status, self._supervisor.geometry
        branch = Branch(path, conversation.system_prompt)
        return await self._tokenising.run(
            owner, meter, self._supervisor.templating, branch, status.max_model_len, geometry, unsaved=unsaved
        )

    def running(self, owner: str, conversation_id: str) -> str | None:
        """Id of the reply being written in this conversation, if any."""
        return self._jobs.written(owner, conversation_id)

    @property
    def active(self) -> int:
        """Replies that are being written."""
        return self._jobs.active

    async def drain(self) -> None:
        """Wait for the running replies, then interrupt those that take too long; they go on afterwards."""
        await self._jobs.claims_released()
        await self._jobs.ended(self._drain_seconds)
        late = [(job.owner, job.reply_id) for job in self._jobs.all()]
        await self._jobs.interrupt_all()
        for owner, reply_id in late if self._resume_replies else ():
            with contextlib.suppress(DbError):
                reply = await self._store.get_message(owner, reply_id)
                if reply.status == "interrupted":
                    await self._resumption.resume(reply)

    async def close(self) -> None:
        """Settle all running replies as interrupted, with their text, and accept no more."""
        self._closing = True
        await self._jobs.claims_released()
        await self._jobs.interrupt_all()
        await self._runner.close()

    async def _reply(self, owner: str, reply_id: str) -> MessageView:
        message = await self._store.get_message(owner, reply_id)
        if message.role != "assistant":
            raise NotFound("reply")
        return message

    # ---- the job -----------------------------------------------------------------------------

    def _begin(
        self, job: Job, engine: EngineClient, request: CompletionRequest, templating: Templating
    ) -> None:
        self._jobs.start(job, self._runner.run(job, engine, request, templating))
