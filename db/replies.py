"""A reply's life: pending, streaming, then one of the final statuses, for good."""

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from db.errors import Conflict, InvalidInput
from db.models import Conversation, Message, User
from db.repository import Repository, message_view, owned_message
from db.values import checked_object, clean_text, pack_tokens
from db.views import FINAL_STATUSES, OPEN_STATUSES, FinalStatus, MessageView


class ReplyStore(Repository):
    """The part of the store that a generation writes to.

    It also writes to replies of a deleted conversation, so that one that is restored has lost nothing.
    """

    async def start_reply(self, owner_id: str, reply_id: str) -> MessageView:
        """Note that the engine works on it. Raises NotFound, or Conflict when it is not pending."""

        def work(session: Session) -> MessageView:
            reply = _owned_reply(session, owner_id, reply_id)
            if reply.status != "pending":
                raise Conflict(f"the reply is {reply.status}, not pending")
            reply.status = "streaming"
            reply.updated_at = self._now()
            session.flush()
            return message_view(session, owner_id, reply_id)

        return await self._database.write(work)

    async def flush_reply(
        self,
        owner_id: str,
        reply_id: str,
        content: str,
        token_ids: Sequence[int],
        stats: Mapping[str, Any] | None = None,
    ) -> None:
        """Save the reply so far, all text and token ids. Raises NotFound, or Conflict when it is final."""
        values = _values(content, token_ids, stats)

        def work(session: Session) -> None:
            self._write_open(session, owner_id, reply_id, values)

        await self._database.write(work)

    async def finish_reply(
        self,
        owner_id: str,
        reply_id: str,
        status: FinalStatus,
        content: str,
        token_ids: Sequence[int],
        stats: Mapping[str, Any] | None = None,
        finish_reason: str | None = None,
        error: str | None = None,
    ) -> MessageView:
        """Save the whole reply and its final status. Raises NotFound, or Conflict when it has one."""
        if status not in FINAL_STATUSES:
            raise InvalidInput("status", f"must be one of {', '.join(FINAL_STATUSES)}")
        values = _values(content, token_ids, stats) | {
            "status": status,
            "finish_reason": finish_reason,
            "error": error and clean_text(error),
        }

        def work(session: Session) -> MessageView:
            reply = self._write_open(session, owner_id, reply_id, values)
            session.execute(
                update(Conversation)
                .where(Conversation.id == reply.conversation_id, Conversation.user_id == owner_id)
                .values(updated_at=reply.updated_at)
            )
            return message_view(session, owner_id, reply_id)

        return await self._database.write(work)

    async def reopen_reply(
        self, owner_id: str, reply_id: str, stats: Mapping[str, Any] | None = None
    ) -> MessageView:
        """Make a final reply pending again, so that it can go on; it becomes the active leaf.

        Its text and ids stay, and its stats where no others are given. Raises NotFound, or Conflict when it
        is still being written or when messages follow it, which answer what it says now.
        """
        checked = None if stats is None else checked_object("stats", dict(stats))

        def work(session: Session) -> MessageView:
            reply = _owned_reply(session, owner_id, reply_id, deleted=False)
            if reply.status in OPEN_STATUSES:
                raise Conflict("the reply is still being written")
            if session.scalar(select(Message.id).where(Message.parent_id == reply.id).limit(1)):
                raise Conflict("the conversation has gone on after this reply: only the last one can go on")
            reply.status = "pending"
            reply.finish_reason = reply.error = None
            if checked is not None:
                reply.stats = checked
            reply.updated_at = self._now()
            session.execute(
                update(Conversation)
                .where(Conversation.id == reply.conversation_id, Conversation.user_id == owner_id)
                .values(active_leaf_id=reply.id, updated_at=reply.updated_at)
            )
            session.flush()
            return message_view(session, owner_id, reply_id)

        return await self._database.write(work)

    async def resumable_replies(self, since: int, limit: int = 1000) -> list[MessageView]:
        """Interrupted replies of everybody that may go on by themselves, oldest first.

        These are the last messages of the active branches of conversations that are not deleted, of users who
        may sign in, interrupted at or after `since` (UTC milliseconds).
        """

        def work(session: Session) -> list[MessageView]:
            query = (
                select(Message.user_id, Message.id)
                .join(Conversation, Conversation.active_leaf_id == Message.id)
                .join(User, User.id == Message.user_id)
                .where(
                    Message.status == "interrupted",
                    Message.updated_at >= since,
                    Conversation.deleted_at.is_(None),
                    User.disabled_at.is_(None),
                )
                .order_by(Message.seq)
                .limit(limit)
            )
            return [message_view(session, owner, reply) for owner, reply in session.execute(query)]

        return await self._database.read(work)

    async def recover_interrupted(self) -> int:
        """Mark every unfinished reply of everybody as interrupted, with its text; return how many there were.

        For the start only: at that time nothing can be writing them.
        """

        def work(session: Session) -> int:
            found = session.scalars(
                update(Message)
                .where(Message.status.in_(OPEN_STATUSES))
                .values(status="interrupted", updated_at=self._now())
                .returning(Message.id)
            )
            return len(found.all())

        return await self._database.write(work)

    def _write_open(
        self, session: Session, owner_id: str, reply_id: str, values: Mapping[str, Any]
    ) -> Message:
        reply = _owned_reply(session, owner_id, reply_id)
        if reply.status not in OPEN_STATUSES:
            raise Conflict(f"the reply is {reply.status} already")
        for name, value in values.items():
            setattr(reply, name, value)
        reply.updated_at = self._now()
        session.flush()
        return reply


def _owned_reply(session: Session, owner_id: str, reply_id: str, *, deleted: bool = True) -> Message:
    reply = owned_message(session, owner_id, reply_id, deleted=deleted)
    if reply.role != "assistant":
        raise InvalidInput("reply_id", "must be a reply")
    return reply


def _values(content: str, token_ids: Sequence[int], stats: Mapping[str, Any] | None) -> dict[str, Any]:
    values: dict[str, Any] = {"content": clean_text(content), "token_ids": pack_tokens(token_ids)}
    if stats is not None:
        values["stats"] = checked_object("stats", dict(stats))
    return values
