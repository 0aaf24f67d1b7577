"""The events of messages: sending, editing, regenerating, going on, versions, and following a reply."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, cast

import gradio as gr

from app.errors import AppError
from app.events import ReplyHandle
from app.services import Services
from app.ui.guard import guarded, owner_of, session_of, told
from app.ui.markdown import typed_message
from app.ui.meter import LiveMeter
from app.ui.parts import Parts
from app.ui.progress import paced
from app.ui.render import chat_message, chat_messages, notice
from app.ui.screen import PAGE, Screen, Update, spanned
from app.ui.shown import Pages
from db.errors import DbError
from tangram.errors import TangramError

UPDATE_SECONDS = 0.1


class MessageHandlers:
    """Event handlers of the thread. `not_ready`: what is said when a message must wait for the engine."""

    not_ready = ""

    def __init__(self, services: Services, parts: Parts) -> None:
        self.services = services
        self.parts = parts
        self.screen = Screen(services, parts)
        self.pages = Pages()

    @guarded
    async def send(
        self, text: str, conversation_id: str, leaf: str, query: str, request: gr.Request
    ) -> Update:
        owner, content = owner_of(request), text.strip()
        if not content:
            return {self.parts.notice: ""}
        state = self.services.supervisor.status.state
        if state != "ready":
            return {self.parts.notice: self.not_ready}
        target = conversation_id or (await self.services.store.create_conversation(owner)).id
        try:
            await self.services.generation.send(owner, target, content, parent_id=leaf or None)
        except Exception:
            if not conversation_id:
                await self.services.store.delete_conversation(owner, target)
            raise
        page = await self.screen.conversation(owner, target, query)
        live = bool(page[self.parts.live])  # a short reply may have ended by now
        return {**page, **self.screen.composer(live, value="")}

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
        """Run what starts a reply. When it is refused, show again what is stored, with the reason."""
        problem = ""
        try:
            await start
        except (AppError, TangramError) as error:
            problem = notice(str(error))
        return {**await self.screen.thread(owner, conversation_id), self.parts.notice: problem}

    @guarded
    async def regenerate_reply(
        self, conversation_id: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner = owner_of(request)
        start = self.services.generation.regenerate(owner, conversation_id, str(event.id))
        return await self._restart_from(owner, conversation_id, start)

    @guarded
    async def continue_reply(self, conversation_id: str, event: gr.EventData, request: gr.Request) -> Update:
        owner = owner_of(request)
        start = self.services.generation.continue_reply(owner, conversation_id, str(event.id))
        return await self._restart_from(owner, conversation_id, start)

    @guarded
    async def edit_message(
        self, conversation_id: str, leaf: str, span: str, event: gr.EditData, request: gr.Request
    ) -> Update:
        owner, shown = owner_of(request), spanned(span)
        path = await self.services.store.path(owner, conversation_id, leaf, limit=shown)
        index = event.index if isinstance(event.index, int) else event.index[0]
        content = typed_message(str(event.value)).strip()
        if not content or content == path[index].content:
            return self.screen.messages(conversation_id, path, shown)
        start = self.services.generation.edit(owner, conversation_id, path[index].id, content)
        return await self._restart_from(owner, conversation_id, start)

    @guarded
    async def show_version(self, conversation_id: str, event: gr.EventData, request: gr.Request) -> Update:
        owner = owner_of(request)
        store = self.services.store
        siblings = await store.siblings(owner, str(event.id))
        target = siblings.index(str(event.id)) + int(event.step)
        wanted = siblings[min(max(target, 0), len(siblings) - 1)]
        await store.set_active_leaf(owner, conversation_id, wanted)
        path = await store.path(owner, conversation_id)
        # What was asked for stays in sight, however much follows it.
        depth = next(place for place, message in enumerate(path) if message.id == wanted)
        return self.screen.messages(conversation_id, path, max(PAGE, len(path) - depth + 1))

    @guarded
    async def show_earlier(self, conversation_id: str, leaf: str, span: str, request: gr.Request) -> Update:
        """A step upward in a long thread. Steps grow, so that few lead to the top."""
        longer = spanned(span) + max(PAGE, spanned(span) // 2)
        path = await self.services.store.path(owner_of(request), conversation_id, leaf, limit=longer)
        return self.screen.messages(conversation_id, path, longer)

    @guarded
    async def measure(self, conversation_id: str, leaf: str, request: gr.Request) -> Update:
        return await self.screen.context(owner_of(request), conversation_id, leaf)

    @guarded
    async def stop(self, live: str, request: gr.Request) -> Update:
        reply_id = live.partition(":")[0]
        if reply_id:
            await self.services.generation.stop(owner_of(request), reply_id)
        return {self.parts.notice: ""}

    async def follow(self, live: str, request: gr.Request) -> AsyncIterator[Update]:
        """Show a reply while it is written; a closed page only detaches."""
        reply_id, _, rest = live.partition(":")
        page = self.pages.of(session_of(request))
        seen = -1
        if reply_id and page.shows(live):
            with page.following(live):
                owner, span = owner_of(request), spanned(rest.partition(":")[0])
                async with aclosing(self._updates(owner, reply_id, span)) as updates:
                    async for update in updates:
                        if not page.follows(live):
                            seen = -1
                            break
                        if self.parts.live in update:
                            page.tell(update[self.parts.live])
                        with page.painting():
                            seen = page.told
                            yield update
        # Gradio sends the last update again when a generator ends, and nothing waits for that: once anything
        # else is shown, let it be an empty one. A generator that yields nothing would empty every output.
        if page.told != seen:
            yield {self.parts.notice: gr.skip()}

    async def _updates(self, owner: str, reply_id: str, span: int) -> AsyncGenerator[Update, None]:
        store = self.services.store
        try:
            reply = await store.get_message(owner, reply_id)
            path = await store.path(owner, reply.conversation_id, leaf_id=reply_id, limit=span)
            before, ring = chat_messages(path[:-1], more=True), LiveMeter()
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
                    if state.done:
                        continue
                    update: Update = {
                        self.parts.chatbot: [*before, chat_message(now, position=state.position)]
                    }
                    if html := ring.drawn(self.services.generation.growing_context(owner, reply_id)):
                        update[self.parts.meter] = html
                    yield update
            final = await store.get_message(owner, reply_id)
            if final.status in ("pending", "streaming"):  # it ended, but the disk did not take it
                final = now
            yield {
                self.parts.chatbot: [*before, chat_message(final)],
                self.parts.live: "",
                **self.screen.composer(False),
                **await self.screen.context(owner, reply.conversation_id, reply_id),
            }
        except (AppError, DbError, TangramError) as error:
            yield {self.parts.notice: notice(told(error)), self.parts.live: "", **self.screen.composer(False)}
