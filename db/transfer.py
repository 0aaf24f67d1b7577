"""Taking conversations in from elsewhere: out of sight until all of them are there, then shown at once."""

import asyncio
from collections.abc import Iterator, Sequence
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

_BATCH_CHARACTERS = 40_000
_BATCH_ROWS = 500
"""What one transaction takes in, so that the writes of others are never kept waiting for long: indexing the
text takes most of the time. A single message may be longer."""
_DISCARDED_CONVERSATIONS = 20


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

        They are written in several transactions, as deleted ones, and appear together with the last.
        """
        await asyncio.to_thread(_check_all, conversations)
        async with self._importing:
            await self._discard(owner_id)
            ids: list[str] = []
            try:
                for batch in _batches(conversations):
                    ids += await self._database.write(partial(_add_all, owner_id, batch, self._now()))
                await self._database.write(lambda session: _publish(session, owner_id))
            except BaseException:
                await self._discard(owner_id)
                raise
            return ids

    async def discard_unfinished_imports(self) -> int:
        """At start: remove what the end of the process left of imports; of how many conversations."""
        async with self._importing:
            return await self._discard(None)

    async def _discard(self, owner_id: str | None) -> int:
        count = 0
        while (
            removed := await self._database.write(lambda session: _discard(session, owner_id))
        ) is not None:
            count += removed
        return count


_STAGED = -1
"""`deleted_at` of conversations that are still being taken in: no time, so that nobody can restore them."""


def _check_all(conversations: Sequence[NewConversation]) -> None:
    for conversation in conversations:
        _check(conversation)


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


@dataclass(frozen=True, slots=True)
class _Piece:
    """Messages `start` to `stop` of a conversation, for one transaction. `ids`: of all its messages."""

    id: str
    conversation: NewConversation
    ids: list[str]
    start: int
    stop: int


def _batches(conversations: Sequence[NewConversation]) -> Iterator[list[_Piece]]:
    """Pieces of conversations, in order, together as large as one transaction may be."""
    batch: list[_Piece] = []
    rows = characters = 0
    for conversation in conversations:
        own, ids = new_id(), [new_id() for _ in conversation.messages]
        start = 0
        rows += 1
        characters += len(conversation.system_prompt)
        for place, message in enumerate(conversation.messages):
            too_much = rows >= _BATCH_ROWS or characters + len(message.content) > _BATCH_CHARACTERS
            if too_much and (batch or place > start):
                if place > start:
                    batch.append(_Piece(own, conversation, ids, start, place))
                yield batch
                batch, rows, characters, start = [], 0, 0, place
            rows += 1
            characters += len(message.content)
        batch.append(_Piece(own, conversation, ids, start, len(ids)))
    if batch:
        yield batch


def _add_all(owner_id: str, batch: Sequence[_Piece], now: int, session: Session) -> list[str]:
    """Write the pieces; the ids of the conversations that begin here."""
    if session.get(User, owner_id) is None:
        raise NotFound("user")
    for piece in batch:
        if piece.start == 0:
            _add_conversation(session, owner_id, piece, now)
        if piece.start < piece.stop:
            _add_messages(session, owner_id, piece, now)
    return [piece.id for piece in batch if piece.start == 0]


def _add_conversation(session: Session, owner_id: str, piece: _Piece, now: int) -> None:
    new = piece.conversation
    title = " ".join(clean_text(new.title).split())[:MAX_TITLE].strip()
    first = next((message.content for message in new.messages if message.role == "user"), "")
    session.add(
        Conversation(
            id=piece.id,
            user_id=owner_id,
            title=title or title_from(first),
            system_prompt=clean_text(new.system_prompt),
            settings=new.settings,
            created_at=new.created_at or now,
            updated_at=new.updated_at or new.created_at or now,
            deleted_at=_STAGED,
            archived_at=now if new.archived else None,
        )
    )
    session.flush()


def _add_messages(session: Session, owner_id: str, piece: _Piece, now: int) -> None:
    new, ids = piece.conversation, piece.ids
    next_seq = (session.scalar(select(func.coalesce(func.max(Message.seq), 0))) or 0) + 1
    session.execute(
        insert(Message),
        [
            {
                "seq": next_seq + place - piece.start,
                "id": ids[place],
                "user_id": owner_id,
                "conversation_id": piece.id,
                "parent_id": None if message.parent is None else ids[message.parent],
                "role": message.role,
                "content": clean_text(message.content),
                "token_ids": b"",
                "status": message.status,
                "stats": {},
                "model": message.model and clean_text(message.model),
                "rating": message.rating,
                "created_at": message.created_at or new.created_at or now,
                "updated_at": message.created_at or new.created_at or now,
            }
            for place in range(piece.start, piece.stop)
            for message in (new.messages[place],)
        ],
    )
    if piece.stop == len(ids):
        session.execute(
            update(Conversation).where(Conversation.id == piece.id).values(active_leaf_id=ids[_leaf(new)])
        )


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


def _discard(session: Session, owner_id: str | None) -> int | None:
    """Remove some of what is staged (None: anybody's), the last messages first, for their parents must not go
    before them. How many conversations are gone with that; None when there was nothing."""
    staged = select(Conversation.id).where(Conversation.deleted_at == _STAGED)
    if owner_id is not None:
        staged = staged.where(Conversation.user_id == owner_id)
    some = list(session.scalars(staged.limit(_DISCARDED_CONVERSATIONS)))
    if not some:
        return None
    last = select(Message.seq).where(Message.conversation_id.in_(some))
    newest = list(session.scalars(last.order_by(Message.seq.desc()).limit(_BATCH_ROWS)))
    lengths = select(func.length(Message.content)).where(Message.seq.in_(newest))
    total, fit = 0, 0
    for length in session.scalars(lengths.order_by(Message.seq.desc())):
        total += length
        if fit and total > _BATCH_CHARACTERS:
            break
        fit += 1
    chosen = Conversation.id.in_(some)
    session.execute(update(Conversation).where(chosen).values(active_leaf_id=None))
    session.execute(delete(Message).where(Message.seq.in_(newest[:fit])))
    if fit == len(newest) < _BATCH_ROWS:
        session.execute(delete(Conversation).where(chosen))
        return len(some)
    return 0
