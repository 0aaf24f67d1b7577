"""What the parts of the store share: the database, the clock, users, and look-ups that check the owner."""

import secrets
from typing import Any

from sqlalchemy import Select, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, aliased

from db.database import Database
from db.errors import Conflict, NotFound
from db.expressions import same_parent
from db.models import Conversation, Message, User
from db.values import Clock, name_key, new_id, unpack_tokens
from db.views import ConversationView, MessageView, UserView


class Repository:
    """Base of the parts of the store."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._now = Clock()


def execute(session: Session, statement: Any) -> None:
    """Run a statement for its effect alone."""
    session.execute(statement)


def existing_user(session: Session, user_id: str) -> User:
    """The user, disabled or not. Raises NotFound."""
    user = session.get(User, user_id)
    if user is None:
        raise NotFound("user")
    return user


def add_user(session: Session, name: str, password_hash: str, is_admin: bool, now: int) -> UserView:
    """Add a user with a fresh cache salt. Raises Conflict when the name is taken, see `values.name_key`."""
    # SQLite folds ASCII letters only.
    key = name_key(name)
    if any(name_key(taken) == key for taken in session.scalars(select(User.name))):
        raise Conflict("that name is taken")
    user = User(
        id=new_id(),
        name=name,
        password_hash=password_hash,
        is_admin=is_admin,
        cache_salt=secrets.token_hex(32),
        created_at=now,
    )
    session.add(user)
    try:
        session.flush()
    except IntegrityError as error:
        raise Conflict("that name is taken") from error
    return user_view(user)


def user_view(row: User) -> UserView:
    """The record of a user."""
    return UserView(
        id=row.id,
        name=row.name,
        password_hash=row.password_hash,
        is_admin=row.is_admin,
        cache_salt=row.cache_salt,
        created_at=row.created_at,
        disabled_at=row.disabled_at,
    )


def owned_conversation(
    session: Session, owner_id: str, conversation_id: str, *, deleted: bool = False
) -> Conversation:
    """The owner's conversation. Raises NotFound; a deleted one counts only when `deleted` is set."""
    query = select(Conversation).where(Conversation.id == conversation_id, Conversation.user_id == owner_id)
    if not deleted:
        query = query.where(Conversation.deleted_at.is_(None))
    conversation = session.scalars(query).one_or_none()
    if conversation is None:
        raise NotFound("conversation")
    return conversation


def owned_message(session: Session, owner_id: str, message_id: str, *, deleted: bool = False) -> Message:
    """The owner's message. Raises NotFound; in a deleted conversation it counts only with `deleted`."""
    query = select(Message).where(Message.id == message_id, Message.user_id == owner_id)
    if not deleted:
        query = query.join(Conversation, Conversation.id == Message.conversation_id).where(
            Conversation.deleted_at.is_(None)
        )
    message = session.scalars(query).one_or_none()
    if message is None:
        raise NotFound("message")
    return message


def conversation_view(row: Conversation) -> ConversationView:
    """The record of a conversation."""
    return ConversationView(
        id=row.id,
        user_id=row.user_id,
        title=row.title,
        system_prompt=row.system_prompt,
        settings=row.settings,
        active_leaf_id=row.active_leaf_id,
        created_at=row.created_at,
        updated_at=row.updated_at,
        deleted_at=row.deleted_at,
        archived_at=row.archived_at,
    )


def select_messages(owner_id: str) -> Select[*tuple[Any, ...]]:
    """The columns of MessageView for the owner's messages, to be narrowed by the caller.

    The two sibling counts are answered from the index (conversation, parent, seq) alone.
    """
    sibling = aliased(Message)
    count = (
        select(func.count())
        .where(
            sibling.conversation_id == Message.conversation_id,
            same_parent(sibling.parent_id, Message.parent_id),
        )
        .correlate(Message)
    )
    columns = select(
        Message.id,
        Message.user_id,
        Message.conversation_id,
        Message.parent_id,
        Message.role,
        Message.content,
        Message.token_ids,
        Message.status,
        Message.finish_reason,
        Message.error,
        Message.stats,
        Message.model,
        Message.created_at,
        Message.updated_at,
        Message.rating,
        count.where(sibling.seq < Message.seq).scalar_subquery().label("sibling_index"),
        count.scalar_subquery().label("sibling_count"),
    )
    return columns.where(Message.user_id == owner_id)


def message_views(session: Session, query: Select[*tuple[Any, ...]]) -> list[MessageView]:
    """The records that a query of `select_messages` finds."""
    return [
        MessageView(**(dict(row) | {"token_ids": unpack_tokens(row["token_ids"])}))
        for row in session.execute(query).mappings()
    ]


def message_view(session: Session, owner_id: str, message_id: str) -> MessageView:
    """The record of one of the owner's messages, as this transaction sees it."""
    found = message_views(session, select_messages(owner_id).where(Message.id == message_id))
    if not found:
        raise NotFound("message")
    return found[0]
