"""What the chat page shows: updates of its components, by component."""

import itertools
from typing import Any

import gradio as gr

from app.services import Services
from app.ui import shell
from app.ui.meter import meter
from app.ui.parts import Parts
from app.ui.render import UNTITLED, chat_messages, is_live
from app.ui.sidebar import conversation_list
from db.views import ConversationView, MessageView

LIST_LIMIT = 300
ARCHIVE_LIMIT = 100
PAGE = 50
"""Messages that are shown at first, and added by a step upward."""

Update = dict[Any, Any]


def spanned(span: str) -> int:
    """The number in the hidden component, which the page sends back."""
    return min(max(int(span), PAGE), 100_000) if span.isascii() and span.isdigit() and len(span) < 7 else PAGE


class Screen:
    """Builds updates from what is stored. Every read names the owner."""

    def __init__(self, services: Services, parts: Parts) -> None:
        self.parts = parts
        self._services = services
        self._store = services.store
        self._turn = itertools.count()

    async def conversations(self, owner: str, active: str, query: str) -> Update:
        """The sidebar's list, with one conversation marked, narrowed by a search."""
        asked = query.strip() or None
        items = await self._store.list_conversations(owner, query=asked, limit=LIST_LIMIT, archived=False)
        put_away = await self._store.list_conversations(
            owner, query=asked, limit=ARCHIVE_LIMIT, archived=True
        )
        html = conversation_list(items, active, asked or "", archived=put_away, more=len(items) == LIST_LIMIT)
        return {self.parts.conversations: html}

    def composer(self, live: bool, **changes: Any) -> Update:
        """The input: Stop while a reply is written, else Send."""
        return {self.parts.composer: gr.update(submit_btn=not live, stop_btn=live, **changes)}

    def title(self, conversation: ConversationView | None) -> Update:
        """The top bar."""
        longest = self._services.supervisor.max_reply_tokens  # another model may have another limit
        if conversation is None:
            return {self.parts.top: shell.top_bar(UNTITLED, longest=longest)}
        own = bool(conversation.system_prompt or conversation.settings)
        bar = shell.top_bar(
            conversation.title or UNTITLED,
            conversation.id,
            adjusted=own,
            archived=conversation.archived_at is not None,
            longest=longest,
        )
        return {self.parts.top: bar}

    def messages(self, conversation_id: str, path: list[MessageView], span: int = PAGE) -> Update:
        """The end of a path; when its last reply is still being written, the page follows it."""
        last = path[-1] if path else None
        live = last is not None and is_live(last.status)
        return {
            self.parts.chatbot: chat_messages(path[-span:]),
            self.parts.conversation: conversation_id,
            self.parts.leaf: last.id if last else "",
            self.parts.span: str(span),
            self.parts.live: f"{last.id}:{span}:{next(self._turn)}" if last and live else "",
            **self.composer(live),
        }

    async def thread(
        self, owner: str, conversation_id: str, *, leaf: str | None = None, span: int = PAGE
    ) -> Update:
        """The messages of a conversation's active branch, or of the one that ends in `leaf`."""
        path = await self._store.path(owner, conversation_id, leaf, limit=span)
        return self.messages(conversation_id, path, span)

    async def conversation(self, owner: str, conversation_id: str, query: str) -> Update:
        """A whole conversation. Raises NotFound."""
        conversation = await self._store.get_conversation(owner, conversation_id)
        return {
            **await self.thread(owner, conversation_id),
            **self.title(conversation),
            **await self.conversations(owner, conversation_id, query),
            self.parts.notice: "",
        }

    async def blank(self, owner: str, query: str) -> Update:
        """A conversation that is not begun."""
        return {
            **self.messages("", []),
            **self.title(None),
            **await self.conversations(owner, "", query),
            self.parts.meter: "",
            self.parts.notice: "",
        }

    async def context(self, owner: str, conversation_id: str, leaf: str) -> Update:
        """The context meter of the branch that ends in `leaf`."""
        if not conversation_id or not leaf:
            return {self.parts.meter: ""}
        measured = await self._services.generation.context(owner, conversation_id, leaf)
        return {self.parts.meter: meter(measured)}
