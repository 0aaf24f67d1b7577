"""Taking conversations in from elsewhere: out of sight until all of them are there, then shown at once."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from db.database import Database
from db.errors import InvalidInput, NotFound
from db.models import Conversation, Message, User
from db.repository import Repository
from db.values import MAX_TITLE, checked_object, clean_text, new_id, title_from
from db.views import FINAL_STATUSES, Role

_BATCH_CHARACTERS = 1_000_000
"""What one transaction takes in, so that the replies being written are never kept waiting for long."""


@dataclass(frozen=True, slots=True)
class NewTurn:
    """A message to take in. `parent` is the place in the list of the message before it, None at the start."""

    role: Role
    content: str
    parent: int | None
    status: str = "complete"
    model: str | None = None
    rating: int | None = None
    created_at: int | None = None


@dataclass(frozen=True, slots=True)
class NewConversation:
    """A conversation to take in. `messages`: parents first; `active`: the leaf to show, or the last."""

    title: str
    messages: tuple[NewTurn, ...]
    system_prompt: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    active: int | None = None
    created_at: int | None = None
    updated_at: int | None = None
    archived: bool = False


class TransferStore(Repository):
    """The part of the store that takes conversations in."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._importing = asyncio.Lock()

    async def import_conversations(
        self, owner_id: str, conversations: Sequence[NewConversation]
    ) -> list[str]:
        """Add conversations, all or none; return their ids. Raises NotFound, InvalidInput.

        They are written in several transactions, as deleted ones, and appear together with the last. What is
        left of an attempt that was cut off by the end of the process is removed before the next one.
        """
        for conversation in conversations:
            _check(conversation)
        async with self._importing:
            await self._database.write(lambda session: _discard(session, owner_id))
            ids: list[str] = []
            try:
                for batch in _batches(conversations):
                    ids += await self._database.write(partial(_add_all, owner_id, batch, self._now()))
                await self._database.write(lambda session: _publish(session, owner_id))
            except BaseException:
                await self._database.write(lambda session: _discard(session, owner_id))
                raise
            return ids


_STAGED = -1
"""`deleted_at` of conversations that are still being taken in: no time, so that nobody can restore them."""


def _check(conversation: NewConversation) -> None:
    checked_object("settings", conversation.settings)
    for place, message in enumerate(conversation.messages):
        parent = message.parent
        if parent is not None and not 0 <= parent < place:
            raise InvalidInput("parent", "must be an earlier message")
        before = None if parent is None else conversation.messages[parent].role
        if before != (None if message.role == "user" and parent is None else _OTHER[message.role]):
            raise InvalidInput("role", "a reply follows a user's message, and a user's message a reply")
        if message.status not in FINAL_STATUSES:
            raise InvalidInput("status", f"must be one of {', '.join(FINAL_STATUSES)}")
        if message.rating not in (1, -1, None) or (message.rating and message.role == "user"):
            raise InvalidInput("rating", "must be 1, -1 or null, and a reply's")


_OTHER: dict[Role, Role] = {"user": "assistant", "assistant": "user"}


def _batches(conversations: Sequence[NewConversation]) -> list[list[NewConversation]]:
    batches: list[list[NewConversation]] = [[]]
    size = 0
    for conversation in conversations:
        own = sum(len(message.content) for message in conversation.messages)
        if batches[-1] and size + own > _BATCH_CHARACTERS:
            batches.append([])
            size = 0
        batches[-1].append(conversation)
        size += own
    return batches


def _add_all(owner_id: str, batch: Sequence[NewConversation], now: int, session: Session) -> list[str]:
    return [_add(session, owner_id, each, now) for each in batch]


def _add(session: Session, owner_id: str, new: NewConversation, now: int) -> str:
    if session.get(User, owner_id) is None:
        raise NotFound("user")
    title = " ".join(clean_text(new.title).split())[:MAX_TITLE].strip()
    first = next((message.content for message in new.messages if message.role == "user"), "")
    row = Conversation(
        id=new_id(),
        user_id=owner_id,
        title=title or title_from(first),
        system_prompt=clean_text(new.system_prompt),
        settings=new.settings,
        created_at=new.created_at or now,
        updated_at=new.updated_at or new.created_at or now,
        deleted_at=_STAGED,
        archived_at=now if new.archived else None,
    )
    session.add(row)
    session.flush()
    if new.messages:
        ids = [new_id() for _ in new.messages]
        next_seq = session.scalar(select(func.coalesce(func.max(Message.seq), 0))) or 0
        session.execute(
            insert(Message),
            [
                {
                    "seq": next_seq + 1 + place,
                    "id": ids[place],
                    "user_id": owner_id,
                    "conversation_id": row.id,
                    "parent_id": None if message.parent is None else ids[message.parent],
                    "role": message.role,
                    "content": clean_text(message.content),
                    "token_ids": b"",
                    "status": message.status,
                    "stats": {},
                    "model": message.model and clean_text(message.model),
                    "rating": message.rating,
                    "created_at": message.created_at or row.created_at,
                    "updated_at": message.created_at or row.created_at,
                }
                for place, message in enumerate(new.messages)
            ],
        )
        row.active_leaf_id = ids[_leaf(new)]
    return row.id


def _leaf(new: NewConversation) -> int:
    """The leaf that `active` leads to: of several below it, the last one."""
    place = len(new.messages) - 1 if new.active is None else new.active
    for later in range(place + 1, len(new.messages)):
        if new.messages[later].parent == place:
            place = later
    return place


def _publish(session: Session, owner_id: str) -> None:
    session.execute(
        update(Conversation)
        .where(Conversation.user_id == owner_id, Conversation.deleted_at == _STAGED)
        .values(deleted_at=None)
    )


def _discard(session: Session, owner_id: str) -> None:
    session.execute(
        delete(Conversation).where(Conversation.user_id == owner_id, Conversation.deleted_at == _STAGED)
    )
