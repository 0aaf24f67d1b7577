"""What the chat page does when something is clicked: each method serves one event of `app.ui.chat`.

The page keeps nothing on the server: it sends the ids it shows, and the owner comes from the session of every
single request, so an id that belongs to somebody else is simply not found.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import gradio as gr

from app.errors import AppError, NotSignedIn
from app.events import ReplyHandle
from app.services import Services
from app.ui import shell
from app.ui.following import Followers
from app.ui.guard import GONE, guarded
from app.ui.markdown import typed_message
from app.ui.parts import Parts
from app.ui.progress import paced
from app.ui.render import chat_message, chat_messages, notice, undo_toast
from app.ui.screen import Screen, Update
from db.errors import DbError, NotFound
from tangram.errors import TangramError

UPDATE_SECONDS = 0.1
NOT_READY = notice("The engine is not ready yet. Your message is still here.", "warn")


def _owner(request: gr.Request) -> str:
    if not request.username:
        raise NotSignedIn
    return str(request.username)


def _session(request: gr.Request) -> str:
    return request.session_hash or ""


class ChatHandlers:
    """Event handlers over the services, in the same process."""

    def __init__(self, services: Services, parts: Parts) -> None:
        self.services = services
        self.parts = parts
        self.screen = Screen(services.store, parts)
        self._followers = Followers()

    @guarded
    async def load(self, wanted: str, request: gr.Request) -> Update:
        """First paint: the account, the list and the conversation named in the address."""
        owner = _owner(request)
        user = await self.services.store.user_by_id(owner)
        if user is None:
            raise NotSignedIn
        page = await self.screen.blank(owner, "")
        if wanted:
            try:
                page = await self.screen.conversation(owner, wanted, "")
            except NotFound:
                page[self.parts.notice] = notice(GONE, "warn")
        return {**page, self.parts.account: shell.account_row(user.name, user.is_admin), **self.engine()}

    def engine(self, shown: str = "") -> Update:
        """The banner: empty while the engine can answer. Takes back what ``send`` said until then.

        ``shown``: the notice that the page shows.
        """
        status = self.services.supervisor.status
        update: Update = {self.parts.banner: shell.engine_banner(status.state, status.detail or "")}
        if status.state == "ready" and shown == NOT_READY:
            update[self.parts.notice] = ""
        return update

    @guarded
    async def open_chat(self, query: str, event: gr.EventData, request: gr.Request) -> Update:
        await self._followers.leave(_session(request))
        return await self.screen.conversation(_owner(request), str(event.id), query)

    @guarded
    async def new_chat(self, query: str, request: gr.Request) -> Update:
        await self._followers.leave(_session(request))
        return await self.screen.blank(_owner(request), query)

    @guarded
    async def search(self, query: str, conversation_id: str, request: gr.Request) -> Update:
        return await self.screen.conversations(_owner(request), conversation_id, query)

    @guarded
    async def rename_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner = _owner(request)
        title = " ".join(str(event.title).split())
        if not title:
            return {self.parts.notice: notice("A title needs at least one character.", "warn")}
        await self.services.store.rename_conversation(owner, str(event.id), title)
        update = await self.screen.conversations(owner, conversation_id, query)
        return {**update, **self.screen.title(title)} if event.id == conversation_id else update

    @guarded
    async def delete_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner, target = _owner(request), str(event.id)
        conversation = await self.services.store.get_conversation(owner, target)
        if running := self.services.generation.running(owner, target):
            await self.services.generation.stop(owner, running)
        await self.services.store.delete_conversation(owner, target)
        if target == conversation_id:
            await self._followers.leave(_session(request))
            page = await self.screen.blank(owner, query)
        else:
            page = await self.screen.conversations(owner, conversation_id, query)
        return {**page, self.parts.toast: undo_toast(conversation)}

    @guarded
    async def restore_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner, target = _owner(request), str(event.id)
        await self.services.store.restore_conversation(owner, target)
        if conversation_id:
            page = await self.screen.conversations(owner, conversation_id, query)
        else:
            page = await self.screen.conversation(owner, target, query)
        return {**page, self.parts.toast: ""}

    @guarded
    async def send(
        self, text: str, conversation_id: str, leaf: str, query: str, request: gr.Request
    ) -> Update:
        owner, content = _owner(request), text.strip()
        if not content:
            return {self.parts.notice: ""}
        state = self.services.supervisor.status.state
        if state != "ready":
            return {self.parts.notice: NOT_READY}
        target = conversation_id or (await self.services.store.create_conversation(owner)).id
        try:
            await self.services.generation.send(owner, target, content, parent_id=leaf or None)
        except Exception:
            if not conversation_id:
                await self.services.store.delete_conversation(owner, target)
            raise
        return {
            **await self.screen.conversation(owner, target, query),
            **self.screen.composer(True, value=""),
        }

    @guarded
    async def use_example(
        self, conversation_id: str, leaf: str, query: str, event: gr.SelectData, request: gr.Request
    ) -> Update:
        text = str(event.value["text"])
        update = await self.send(text, conversation_id, leaf, query, request)
        if self.parts.chatbot not in update:
            update = {**update, self.parts.composer: gr.update(value=text)}
        return update

    async def _restart_from(self, owner: str, conversation_id: str, start: Awaitable[ReplyHandle]) -> Update:
        """Run a regenerate or an edit. When it is refused, show again what is stored, with the reason."""
        problem = ""
        try:
            await start
        except (AppError, TangramError) as error:
            problem = notice(str(error))
        path = await self.services.store.path(owner, conversation_id)
        return {**self.screen.messages(conversation_id, path), self.parts.notice: problem}

    @guarded
    async def regenerate_reply(
        self, conversation_id: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner = _owner(request)
        start = self.services.generation.regenerate(owner, conversation_id, str(event.id))
        return await self._restart_from(owner, conversation_id, start)

    @guarded
    async def edit_message(
        self, conversation_id: str, leaf: str, event: gr.EditData, request: gr.Request
    ) -> Update:
        owner = _owner(request)
        path = await self.services.store.path(owner, conversation_id, leaf_id=leaf)
        index = event.index if isinstance(event.index, int) else event.index[0]
        content = typed_message(str(event.value)).strip()
        if not content or content == path[index].content:
            return self.screen.messages(conversation_id, path)
        start = self.services.generation.edit(owner, conversation_id, path[index].id, content)
        return await self._restart_from(owner, conversation_id, start)

    @guarded
    async def show_version(self, conversation_id: str, event: gr.EventData, request: gr.Request) -> Update:
        owner = _owner(request)
        await self._followers.leave(_session(request))
        store = self.services.store
        siblings = await store.siblings(owner, str(event.id))
        target = siblings.index(str(event.id)) + int(event.step)
        await store.set_active_leaf(owner, conversation_id, siblings[min(max(target, 0), len(siblings) - 1)])
        return self.screen.messages(conversation_id, await store.path(owner, conversation_id))

    @guarded
    async def stop(self, live: str, request: gr.Request) -> Update:
        reply_id = live.partition(":")[0]
        if reply_id:
            await self.services.generation.stop(_owner(request), reply_id)
        return {self.parts.notice: ""}

    async def follow(self, live: str, request: gr.Request) -> AsyncIterator[Update]:
        """Show a reply while it is written; a closed page only detaches."""
        reply_id = live.partition(":")[0]
        if not reply_id:
            # A generator that yields nothing would empty every output.
            yield {self.parts.notice: gr.skip()}
            return
        owner = _owner(request)
        with self._followers.follow(_session(request)) as follower:
            async with aclosing(self._updates(owner, reply_id)) as updates:
                async for update in updates:
                    if follower.left:
                        # Gradio sends the last update again when a generator ends: let that be an empty one.
                        yield {self.parts.notice: gr.skip()}
                        return
                    with follower.showing():
                        yield update

    async def _updates(self, owner: str, reply_id: str) -> AsyncGenerator[Update, None]:
        store = self.services.store
        try:
            reply = await store.get_message(owner, reply_id)
            path = await store.path(owner, reply.conversation_id, leaf_id=reply_id)
            before = chat_messages(path[:-1])
            events = self.services.generation.subscribe(owner, reply_id)
            async with aclosing(paced(events, UPDATE_SECONDS)) as states:
                async for state in states:
                    now = replace(
                        reply,
                        content=state.text,
                        status=cast(Any, state.status),
                        stats=dict(state.stats),
                        error=state.error,
                    )
                    if not state.done:
                        yield {self.parts.chatbot: [*before, chat_message(now)]}
            final = await store.get_message(owner, reply_id)
            if final.status in ("pending", "streaming"):  # it ended, but the disk did not take it
                final = now
            yield {self.parts.chatbot: [*before, chat_message(final)], **self.screen.composer(False)}
        except NotFound:
            yield {self.parts.notice: notice(GONE), **self.screen.composer(False)}
        except (AppError, DbError, TangramError) as error:
            yield {self.parts.notice: notice(str(error)), **self.screen.composer(False)}
