"""What the chat page shows: updates of its components, by component."""

import itertools
from typing import Any

import gradio as gr

from app.ui import shell
from app.ui.parts import Parts
from app.ui.render import UNTITLED, chat_messages, conversation_list, is_live
from db.store import Store
from db.views import MessageView

LIST_LIMIT = 200

Update = dict[Any, Any]


class Screen:
    """Builds updates from what is stored. Every read names the owner."""

    def __init__(self, store: Store, parts: Parts) -> None:
        self.parts = parts
        self._store = store
        self._turn = itertools.count()

    async def conversations(self, owner: str, active: str, query: str) -> Update:
        """The sidebar's list, with one conversation marked, narrowed by a search."""
        query = query.strip()
        items = await self._store.list_conversations(owner, query=query or None, limit=LIST_LIMIT)
        return {self.parts.conversations: conversation_list(items, active, query)}

    def composer(self, live: bool, **changes: Any) -> Update:
        """The input: Stop while a reply is written, else Send."""
        return {self.parts.composer: gr.update(submit_btn=not live, stop_btn=live, **changes)}

    def title(self, title: str) -> Update:
        """The top bar."""
        return {self.parts.top: shell.top_bar(title or UNTITLED)}

    def messages(self, conversation_id: str, path: list[MessageView]) -> Update:
        """A path of messages; when its last reply is still being written, the page follows it."""
        last = path[-1] if path else None
        live = last is not None and is_live(last.status)
        return {
            self.parts.chatbot: chat_messages(path),
            self.parts.conversation: conversation_id,
            self.parts.leaf: last.id if last else "",
            self.parts.live: f"{last.id}:{next(self._turn)}" if last and live else "",
            **self.composer(live),
        }

    async def conversation(self, owner: str, conversation_id: str, query: str) -> Update:
        """A whole conversation. Raises NotFound."""
        conversation = await self._store.get_conversation(owner, conversation_id)
        path = await self._store.path(owner, conversation_id)
        return {
            **self.messages(conversation_id, path),
            **self.title(conversation.title),
            **await self.conversations(owner, conversation_id, query),
            self.parts.notice: "",
        }

    async def blank(self, owner: str, query: str) -> Update:
        """A conversation that is not begun."""
        return {
            **self.messages("", []),
            **self.title(UNTITLED),
            **await self.conversations(owner, "", query),
            self.parts.notice: "",
        }
