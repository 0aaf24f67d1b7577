"""Conversations: making, listing, searching, changing and deleting them."""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import and_, or_, select, tuple_, update
from sqlalchemy.orm import Session, aliased

from db.errors import InvalidInput, NotFound
from db.models import Conversation, Message, User
from db.repository import Repository, conversation_view, owned_conversation
from db.turns import show_branch
from db.values import checked_object, clean_name, clean_text, new_id
from db.views import ConversationView

MAX_LIMIT = 1000


class ConversationStore(Repository):
    """The part of the store that knows conversations. A stranger's look like missing ones."""

    async def create_conversation(
        self,
        owner_id: str,
        title: str = "",
        system_prompt: str = "",
        settings: Mapping[str, Any] | None = None,
    ) -> ConversationView:
        """Add an empty conversation. Raises NotFound for an unknown owner, InvalidInput for bad settings."""
        title = clean_name("title", title) if title.strip() else ""
        stored = checked_object("settings", dict(settings or {}))

        def work(session: Session) -> ConversationView:
            if session.get(User, owner_id) is None:
                raise NotFound("user")
            now = self._now()
            row = Conversation(
                id=new_id(),
                user_id=owner_id,
                title=title,
                system_prompt=clean_text(system_prompt),
                settings=stored,
                created_at=now,
                updated_at=now,
            )
            session.add(row)
            session.flush()
            return conversation_view(row)

        return await self._database.write(work)

    async def list_conversations(
        self,
        owner_id: str,
        query: str | None = None,
        limit: int = 100,
        before: str | None = None,
        deleted: bool = False,
        archived: bool | None = None,
    ) -> list[ConversationView]:
        """The owner's conversations, the latest activity first.

        `query` keeps those whose title or a finished message contains it, as literal text. `before` is the
        `cursor` of the last conversation of the previous page. `deleted` lists the deleted ones instead;
        `archived` keeps those that are archived, or that are not.
        """
        if not 1 <= limit <= MAX_LIMIT:
            raise InvalidInput("limit", f"must be from 1 to {MAX_LIMIT}")
        found = select(Conversation).where(
            Conversation.user_id == owner_id,
            Conversation.deleted_at > 0 if deleted else Conversation.deleted_at.is_(None),
        )
        if archived is not None:
            found = found.where(Conversation.archived_at.is_not(None) == archived)
        if before is not None:
            found = found.where(tuple_(Conversation.updated_at, Conversation.id) < _position(before))
        if query is not None and query.strip():
            found = found.where(self._database.dialect.matches(owner_id, clean_text(query.strip())))
        found = found.order_by(Conversation.updated_at.desc(), Conversation.id.desc()).limit(limit)
        return await self._database.read(
            lambda session: [conversation_view(row) for row in session.scalars(found)]
        )

    async def get_conversation(self, owner_id: str, conversation_id: str) -> ConversationView:
        """The conversation, or NotFound when it is missing, deleted or somebody else's."""
        return await self._database.read(
            lambda session: conversation_view(owned_conversation(session, owner_id, conversation_id))
        )

    async def rename_conversation(self, owner_id: str, conversation_id: str, title: str) -> ConversationView:
        """Change the title. Raises NotFound, and InvalidInput for an empty or overlong title."""
        return await self._change(owner_id, conversation_id, title=clean_name("title", title))

    async def set_conversation_settings(
        self, owner_id: str, conversation_id: str, settings: Mapping[str, Any]
    ) -> ConversationView:
        """Replace the settings. Raises NotFound, and InvalidInput when they are not a JSON object."""
        return await self._change(
            owner_id, conversation_id, settings=checked_object("settings", dict(settings))
        )

    async def change_conversation(
        self,
        owner_id: str,
        conversation_id: str,
        title: str | None = None,
        system_prompt: str | None = None,
        settings: Mapping[str, Any] | None = None,
        archived: bool | None = None,
        active_message_id: str | None = None,
    ) -> ConversationView:
        """Change what is not None, all or nothing. Raises NotFound, InvalidInput.

        `active_message_id`: show the branch through that message, see `set_active_leaf`.

        A new system prompt holds for the replies to come. The token segments with the old one are forgotten:
        they are made again from the text.
        """
        values: dict[str, Any] = {}
        if title is not None:
            values["title"] = clean_name("title", title)
        if settings is not None:
            values["settings"] = checked_object("settings", dict(settings))
        if archived is not None:
            values["archived_at"] = self._now() if archived else None
        prompt = None if system_prompt is None else clean_text(system_prompt)

        def work(session: Session) -> ConversationView:
            row = owned_conversation(session, owner_id, conversation_id)
            for name, value in values.items():
                setattr(row, name, value)
            if prompt is not None and row.system_prompt != prompt:
                row.system_prompt = prompt
                _forget_first_segments(session, conversation_id)
            if active_message_id is not None:
                show_branch(session, row, active_message_id)
            return conversation_view(row)

        return await self._database.write(work)

    async def delete_conversation(self, owner_id: str, conversation_id: str) -> None:
        """Put the conversation aside, from where `restore_conversation` brings it back. Raises NotFound."""
        await self._change(owner_id, conversation_id, deleted_at=self._now())

    async def restore_conversation(self, owner_id: str, conversation_id: str) -> ConversationView:
        """Undo `delete_conversation`. Raises NotFound; one that is not deleted stays as it is."""

        def work(session: Session) -> ConversationView:
            row = owned_conversation(session, owner_id, conversation_id, deleted=True)
            row.deleted_at = None
            return conversation_view(row)

        return await self._database.write(work)

    async def _change(self, owner_id: str, conversation_id: str, **values: Any) -> ConversationView:
        def work(session: Session) -> ConversationView:
            row = owned_conversation(session, owner_id, conversation_id)
            for name, value in values.items():
                setattr(row, name, value)
            return conversation_view(row)

        return await self._database.write(work)


def _forget_first_segments(session: Session, conversation_id: str) -> None:
    """Empty the segments of the users' messages that no reply with anything in it comes before."""
    first = (
        select(Message.seq, Message.id, Message.conversation_id)
        .where(Message.conversation_id == conversation_id, Message.parent_id.is_(None))
        .cte("first", recursive=True)
    )
    child = aliased(Message)
    first = first.union_all(
        select(child.seq, child.id, child.conversation_id).where(
            child.parent_id == first.c.id,
            child.conversation_id == first.c.conversation_id,
            or_(child.role == "user", and_(child.content == "", child.token_ids == b"")),
        )
    )
    session.execute(
        update(Message)
        .where(Message.role == "user", Message.seq.in_(select(first.c.seq)))
        .values(token_ids=b"")
        .execution_options(synchronize_session=False)
    )


def _position(cursor: str) -> tuple[int, str]:
    updated_at, _, conversation_id = cursor.partition(":")
    if not (updated_at.isascii() and updated_at.isdigit() and len(updated_at) < 19 and conversation_id):
        raise InvalidInput("before", "is not the cursor of a conversation")
    return int(updated_at), clean_text(conversation_id)
