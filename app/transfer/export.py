"""Conversations written out: JSON with all branches, Markdown to read, ShareGPT for other programs."""

import asyncio
import json
import zipfile
from collections.abc import AsyncGenerator, AsyncIterator
from tempfile import SpooledTemporaryFile
from typing import Any, Literal

from app.transfer.names import file_name
from db.database import Database
from db.errors import NotFound
from db.maintenance import EXPORT_FORMAT, export_conversation
from db.store import Store
from db.views import ConversationView, MessageView

Format = Literal["json", "markdown", "sharegpt"]
ENDINGS: dict[Format, str] = {"json": "json", "markdown": "md", "sharegpt": "json"}
MEDIA_TYPES: dict[Format, str] = {
    "json": "application/json",
    "markdown": "text/markdown; charset=utf-8",
    "sharegpt": "application/json",
}

_PAGE = 200
_CHUNK = 64 * 1024
_IN_MEMORY = 8 * 1024 * 1024
_SPEAKERS = {"user": "You", "assistant": "Assistant"}
_SHAREGPT = {"user": "human", "assistant": "gpt"}


def markdown(conversation: ConversationView, path: list[MessageView]) -> str:
    """The branch that is shown, as a text to read."""
    parts = [f"# {conversation.title or 'Conversation'}"]
    if conversation.system_prompt:
        quoted = "\n".join(f"> {line}".rstrip() for line in conversation.system_prompt.splitlines())
        parts.append(f"**System prompt**\n\n{quoted}")
    parts += [f"## {_SPEAKERS[message.role]}\n\n{message.content}".rstrip() for message in path]
    return "\n\n".join(parts) + "\n"


def sharegpt(conversation: ConversationView, path: list[MessageView]) -> dict[str, Any]:
    """The branch that is shown, as an item of a ShareGPT file."""
    turns = [
        {"from": _SHAREGPT[message.role], "value": message.content} for message in path if message.content
    ]
    if conversation.system_prompt:
        turns.insert(0, {"from": "system", "value": conversation.system_prompt})
    return {"id": conversation.id, "title": conversation.title, "conversations": turns}


async def whole(database: Database, owner: str, conversation_id: str) -> dict[str, Any]:
    """A conversation with all its branches, without the token ids, which mean something to one model only."""
    exported = (await export_conversation(database, owner, conversation_id))["conversations"][0]
    for message in exported["messages"]:
        del message["token_ids"]
    return dict(exported)


class Exporter:
    """Writes out what one user owns, a conversation at a time."""

    def __init__(self, store: Store, database: Database, owner: str) -> None:
        self._store = store
        self._database = database
        self._owner = owner

    async def one(self, conversation_id: str, form: Format) -> tuple[str, bytes]:
        """(file name, content) of one conversation. Raises NotFound."""
        conversation = await self._store.get_conversation(self._owner, conversation_id)
        name = file_name(conversation.title, ENDINGS[form])
        if form == "markdown":
            return name, (await self._markdown(conversation)).encode()
        item = await self._item(conversation, form)
        if form == "sharegpt":
            return name, _json([item], indent=2)
        return name, _json({"format": EXPORT_FORMAT, "conversations": [item]}, indent=2)

    async def all(self, form: Format) -> AsyncGenerator[bytes, None]:
        """All conversations that are not deleted, the archived ones too: one JSON file, or texts in a ZIP."""
        if form == "markdown":
            async for chunk in self._zip():
                yield chunk
            return
        yield b"[" if form == "sharegpt" else _json({"format": EXPORT_FORMAT})[:-1] + b', "conversations": ['
        between = b"\n"
        async for conversation in self._conversations():
            try:
                item = await self._item(conversation, form)
            except NotFound:  # deleted meanwhile
                continue
            yield between + _json(item)
            between = b",\n"
        yield b"\n]" if form == "sharegpt" else b"\n]}"

    async def _item(self, conversation: ConversationView, form: Format) -> dict[str, Any]:
        if form == "json":
            return await whole(self._database, self._owner, conversation.id)
        return sharegpt(conversation, await self._store.path(self._owner, conversation.id))

    async def _markdown(self, conversation: ConversationView) -> str:
        return markdown(conversation, await self._store.path(self._owner, conversation.id))

    async def _zip(self) -> AsyncGenerator[bytes, None]:
        taken: set[str] = set()
        with SpooledTemporaryFile(_IN_MEMORY) as spool:
            with zipfile.ZipFile(spool, "w", zipfile.ZIP_DEFLATED) as archive:
                async for conversation in self._conversations():
                    try:
                        text = await self._markdown(conversation)
                    except NotFound:
                        continue
                    name = file_name(conversation.title, "md", taken)
                    await asyncio.to_thread(archive.writestr, name, text)
            spool.seek(0)
            while chunk := spool.read(_CHUNK):
                yield chunk

    async def _conversations(self) -> AsyncIterator[ConversationView]:
        before: str | None = None
        while True:
            page = await self._store.list_conversations(self._owner, limit=_PAGE, before=before)
            for conversation in page:
                yield conversation
            if len(page) < _PAGE:
                return
            before = page[-1].cursor


def _json(value: Any, indent: int | None = None) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=indent).encode()
