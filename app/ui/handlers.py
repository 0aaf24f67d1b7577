"""What the chat page does when something is clicked: each method serves one event of `app.ui.chat`.

The page keeps nothing on the server: it sends the ids it shows, and the owner comes from the session of every
single request, so an id that belongs to somebody else is simply not found.
"""

import gradio as gr

from app.errors import NotSignedIn
from app.ui import shell
from app.ui.guard import GONE, guarded, owner_of, session_of
from app.ui.message_handlers import MessageHandlers
from app.ui.render import notice, undo_toast
from app.ui.screen import Update, spanned
from db.errors import DbError, NotFound

NOT_READY = notice("The engine is not ready yet. Your message is still here.", "warn")


class ChatHandlers(MessageHandlers):
    """Event handlers over the services, in the same process: those of the list, and those of messages."""

    not_ready = NOT_READY

    @guarded
    async def load(self, wanted: str, request: gr.Request) -> Update:
        """First paint: the account, the list and the conversation named in the address."""
        owner = owner_of(request)
        user = await self.services.store.user_by_id(owner)
        if user is None:
            raise NotSignedIn
        try:
            page = await (
                self.screen.conversation(owner, wanted, "") if wanted else self.screen.blank(owner, "")
            )
        except NotFound:
            page = await self.screen.blank(owner, "")
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

    async def tick(
        self,
        shown: str,
        conversation_id: str,
        leaf: str,
        live: str,
        span: str,
        query: str,
        request: gr.Request,
    ) -> Update:
        """Every few seconds: the banner, and what another tab or a lost connection has left behind."""
        update = self.engine(shown)
        if not conversation_id:
            return update
        page = self.pages.of(session_of(request))
        before = page.changes
        try:
            owner = owner_of(request)
            conversation = await self.services.store.get_conversation(owner, conversation_id)
            running = self.services.generation.running(owner, conversation_id)
            moved = conversation.active_leaf_id not in (leaf, None)
            if page.followed or not (moved or live or running):
                return update
            thread = await self.screen.thread(owner, conversation_id, span=spanned(span))
            names = await self.screen.conversations(owner, conversation_id, query) if moved else {}
            if page.changes != before:
                return update
            page.tell(thread[self.parts.live])
            return {**update, **thread, **self.screen.title(conversation), **names}
        except NotFound:
            blank = await self.screen.blank(owner, query)
            if page.changes != before:
                return update
            page.tell("")
            return {**update, **blank, self.parts.notice: notice(GONE, "warn")}
        except (DbError, NotSignedIn):
            return update  # the next tick may know more, and what is shown stays

    @guarded
    async def open_chat(self, query: str, event: gr.EventData, request: gr.Request) -> Update:
        return await self.screen.conversation(owner_of(request), str(event.id), query)

    @guarded
    async def new_chat(self, query: str, request: gr.Request) -> Update:
        return await self.screen.blank(owner_of(request), query)

    @guarded
    async def search(self, query: str, conversation_id: str, request: gr.Request) -> Update:
        return await self.screen.conversations(owner_of(request), conversation_id, query)

    @guarded
    async def refresh(self, query: str, conversation_id: str, request: gr.Request) -> Update:
        """After the page changed something by itself: the list and the top bar."""
        owner = owner_of(request)
        update = await self.screen.conversations(owner, conversation_id, query)
        if conversation_id:
            conversation = await self.services.store.get_conversation(owner, conversation_id)
            update |= self.screen.title(conversation)
        return update

    @guarded
    async def rename_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner = owner_of(request)
        title = " ".join(str(event.title).split())
        if not title:
            return {self.parts.notice: notice("A title needs at least one character.", "warn")}
        renamed = await self.services.store.rename_conversation(owner, str(event.id), title)
        update = await self.screen.conversations(owner, conversation_id, query)
        return {**update, **self.screen.title(renamed)} if event.id == conversation_id else update

    @guarded
    async def archive_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        return await self._archive(True, conversation_id, query, event, request)

    @guarded
    async def unarchive_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        return await self._archive(False, conversation_id, query, event, request)

    async def _archive(
        self, archived: bool, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner, target = owner_of(request), str(event.id)
        changed = await self.services.store.change_conversation(owner, target, archived=archived)
        update = await self.screen.conversations(owner, conversation_id, query)
        if target == conversation_id:
            update |= self.screen.title(changed)
        return {**update, self.parts.toast: undo_toast(changed, "unarchive_chat") if archived else ""}

    @guarded
    async def delete_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner, target = owner_of(request), str(event.id)
        conversation = await self.services.store.get_conversation(owner, target)
        await self.services.generation.stop_conversation(owner, target)
        await self.services.store.delete_conversation(owner, target)
        if target == conversation_id:
            page = await self.screen.blank(owner, query)
        else:
            page = await self.screen.conversations(owner, conversation_id, query)
        return {**page, self.parts.toast: undo_toast(conversation)}

    @guarded
    async def restore_chat(
        self, conversation_id: str, query: str, event: gr.EventData, request: gr.Request
    ) -> Update:
        owner, target = owner_of(request), str(event.id)
        await self.services.store.restore_conversation(owner, target)
        if conversation_id:
            page = await self.screen.conversations(owner, conversation_id, query)
        else:
            page = await self.screen.conversation(owner, target, query)
        return {**page, self.parts.toast: ""}
