"""The message tree: a conversation's turns, their alternatives, and which branch is active."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import literal, select
from sqlalchemy.orm import Session, aliased

from db.errors import Conflict, InvalidInput, NotFound
from db.expressions import same_parent
from db.models import Conversation, Message
from db.repository import (
    Repository,
    message_view,
    message_views,
    owned_conversation,
    owned_message,
    select_messages,
)
from db.values import clean_text, new_id, pack_tokens, title_from
from db.views import OPEN_STATUSES, MessageView


class TurnStore(Repository):
    """The part of the store that grows and walks the message tree."""

    async def path(
        self, owner_id: str, conversation_id: str, leaf_id: str | None = None, limit: int | None = None
    ) -> list[MessageView]:
        """The messages from the root to `leaf_id` (default: the active leaf); empty when there is none yet.

        `limit` leaves only that many, the last ones. Raises NotFound, also for another conversation's leaf.
        """
        if limit is not None and limit < 1:
            raise InvalidInput("limit", "must be at least 1")

        def work(session: Session) -> list[MessageView]:
            leaf = leaf_id or owned_conversation(session, owner_id, conversation_id).active_leaf_id
            if leaf is None:
                return []
            if leaf_id is not None:
                _message_in(session, owner_id, conversation_id, leaf_id)
            step = (
                select(Message.seq, Message.parent_id, Message.user_id, literal(0).label("height"))
                .where(Message.id == leaf, Message.user_id == owner_id)
                .cte("step", recursive=True)
            )
            parent = aliased(Message)
            up = select(parent.seq, parent.parent_id, parent.user_id, step.c.height + 1).where(
                parent.id == step.c.parent_id, parent.user_id == step.c.user_id
            )
            step = step.union_all(up if limit is None else up.where(step.c.height < limit - 1))
            query = select_messages(owner_id).join(step, step.c.seq == Message.seq)
            return message_views(session, query.order_by(step.c.height.desc()))

        return await self._database.read(work)

    async def get_message(self, owner_id: str, message_id: str) -> MessageView:
        """The message, or NotFound when it is missing, in a deleted conversation or somebody else's."""

        def work(session: Session) -> MessageView:
            owned_message(session, owner_id, message_id)
            return message_view(session, owner_id, message_id)

        return await self._database.read(work)

    async def latest_stats(self, owner_id: str, conversation_id: str, limit: int) -> list[dict[str, Any]]:
        """The stats of the replies of a conversation that were begun last, newest first, of all branches.

        Raises NotFound.
        """

        def work(session: Session) -> list[dict[str, Any]]:
            owned_conversation(session, owner_id, conversation_id)
            query = select(Message.stats).where(
                Message.user_id == owner_id,
                Message.conversation_id == conversation_id,
                Message.role == "assistant",
            )
            return list(session.scalars(query.order_by(Message.seq.desc()).limit(limit)))

        return await self._database.read(work)

    async def siblings(self, owner_id: str, message_id: str) -> list[str]:
        """The ids of all messages with the same parent, this one included, oldest first. Raises NotFound."""

        def work(session: Session) -> list[str]:
            message = owned_message(session, owner_id, message_id)
            query = select(Message.id).where(
                Message.user_id == owner_id,
                Message.conversation_id == message.conversation_id,
                same_parent(Message.parent_id, message.parent_id),
            )
            return list(session.scalars(query.order_by(Message.seq)))

        return await self._database.read(work)

    async def add_turn(
        self,
        owner_id: str,
        conversation_id: str,
        parent_id: str | None,
        content: str,
        user_token_ids: Sequence[int],
        model: str | None,
    ) -> tuple[MessageView, MessageView]:
        """Add a user's message and a pending reply to it that becomes the active leaf, all or nothing.

        `parent_id` is the reply that the message answers, or None for a first message (or another version of
        it). An empty title becomes the first line of the message. Raises NotFound, InvalidInput when the
        parent is no reply, and Conflict when that reply is still being written.
        """
        tokens = pack_tokens(user_token_ids)
        content = clean_text(content)

        def work(session: Session) -> tuple[MessageView, MessageView]:
            conversation = owned_conversation(session, owner_id, conversation_id)
            if parent_id is not None:
                parent = _message_in(session, owner_id, conversation_id, parent_id)
                if parent.role != "assistant":
                    raise InvalidInput("parent_id", "must be a reply")
                if parent.status in OPEN_STATUSES:
                    raise Conflict("the reply before it is still being written")
            now = self._now()
            user = Message(
                id=new_id(),
                user_id=owner_id,
                conversation_id=conversation_id,
                parent_id=parent_id,
                role="user",
                content=content,
                token_ids=tokens,
                status="complete",
                stats={},
                created_at=now,
                updated_at=now,
            )
            session.add(user)
            session.flush()
            if not conversation.title:
                conversation.title = title_from(content)
            return message_view(session, owner_id, user.id), self._add_reply(
                session, conversation, user.id, model
            )

        return await self._database.write(work)

    async def add_reply(
        self, owner_id: str, conversation_id: str, user_message_id: str, model: str | None
    ) -> MessageView:
        """Add another pending reply to a user's message and make it the active leaf.

        Raises NotFound, and InvalidInput when the message is itself a reply.
        """

        def work(session: Session) -> MessageView:
            conversation = owned_conversation(session, owner_id, conversation_id)
            if _message_in(session, owner_id, conversation_id, user_message_id).role != "user":
                raise InvalidInput("user_message_id", "must be a user's message")
            return self._add_reply(session, conversation, user_message_id, model)

        return await self._database.write(work)

    async def set_user_tokens(self, owner_id: str, message_id: str, token_ids: Sequence[int]) -> None:
        """Replace the token segment of a user's message. Raises NotFound, and InvalidInput for a reply."""
        tokens = pack_tokens(token_ids)

        def work(session: Session) -> None:
            message = owned_message(session, owner_id, message_id)
            if message.role != "user":
                raise InvalidInput("message_id", "must be a user's message")
            message.token_ids = tokens
            message.updated_at = self._now()

        await self._database.write(work)

    async def rate_reply(self, owner_id: str, reply_id: str, rating: int | None) -> MessageView:
        """Keep what the user thinks of a reply: 1 liked, -1 disliked, None neither.

        Raises NotFound, and InvalidInput for another rating or a user's message.
        """
        if rating not in (1, -1, None):
            raise InvalidInput("rating", "must be 1, -1 or null")

        def work(session: Session) -> MessageView:
            reply = owned_message(session, owner_id, reply_id)
            if reply.role != "assistant":
                raise InvalidInput("reply_id", "must be a reply")
            reply.rating = rating
            session.flush()
            return message_view(session, owner_id, reply_id)

        return await self._database.write(work)

    async def set_active_leaf(self, owner_id: str, conversation_id: str, message_id: str) -> MessageView:
        """Make the branch through a message active, and return its leaf.

        Of several leaves below the message it is the one that was written last. Raises NotFound.
        """

        def work(session: Session) -> MessageView:
            conversation = owned_conversation(session, owner_id, conversation_id)
            return message_view(session, owner_id, show_branch(session, conversation, message_id))

        return await self._database.write(work)

    def _add_reply(
        self, session: Session, conversation: Conversation, user_message_id: str, model: str | None
    ) -> MessageView:
        now = self._now()
        reply = Message(
            id=new_id(),
            user_id=conversation.user_id,
            conversation_id=conversation.id,
            parent_id=user_message_id,
            role="assistant",
            content="",
            token_ids=b"",
            status="pending",
            stats={},
            model=model,
            created_at=now,
            updated_at=now,
        )
        session.add(reply)
        conversation.active_leaf_id = reply.id
        conversation.updated_at = now
        session.flush()
        return message_view(session, conversation.user_id, reply.id)


def _message_in(session: Session, owner_id: str, conversation_id: str, message_id: str) -> Message:
    message = owned_message(session, owner_id, message_id)
    if message.conversation_id != conversation_id:
        raise NotFound("message")
    return message


def show_branch(session: Session, conversation: Conversation, message_id: str) -> str:
    """Make the branch through a message active; the id of its leaf. Raises NotFound."""
    owner_id, conversation_id = conversation.user_id, conversation.id
    _message_in(session, owner_id, conversation_id, message_id)
    # Compared with the row above alone, which is the owner's, as then are those below it: either database may
    # take a conversation or an owner that it is told for more telling than the parent, and read all they have
    # at each step.
    below = (
        select(Message.seq, Message.id, Message.conversation_id)
        .where(Message.id == message_id, Message.user_id == owner_id)
        .cte("below", recursive=True)
    )
    child = aliased(Message)
    below = below.union_all(
        select(child.seq, child.id, child.conversation_id).where(
            child.parent_id == below.c.id,
            child.conversation_id == below.c.conversation_id,
        )
    )
    # The newest of a subtree has no children, for a child is newer than its parent.
    leaf: str = session.scalars(select(below.c.id).order_by(below.c.seq.desc()).limit(1)).one()
    conversation.active_leaf_id = leaf
    return leaf
