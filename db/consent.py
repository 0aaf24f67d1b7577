"""Who lets their conversations be used to calibrate the model, and these conversations' texts."""

from sqlalchemy import select
from sqlalchemy.orm import Session, aliased

from db.errors import NotFound
from db.models import CalibrationConsent, Conversation, Message, User
from db.repository import Repository
from db.views import OPEN_STATUSES


class ConsentStore(Repository):
    """The part of the store that knows what people allow. Each speaks for their own conversations only."""

    async def calibration_consent(self, owner_id: str) -> int | None:
        """When the owner allowed it (ms); None if they do not. Raises NotFound for an unknown owner."""

        def work(session: Session) -> int | None:
            if session.get(User, owner_id) is None:
                raise NotFound("user")
            consent = session.get(CalibrationConsent, owner_id)
            return None if consent is None else consent.given_at

        return await self._database.read(work)

    async def set_calibration_consent(self, owner_id: str, given: bool) -> int | None:
        """Allow it, or not any more; returns as :meth:`calibration_consent`. Raises NotFound.

        Allowing it twice keeps the first time.
        """

        def work(session: Session) -> int | None:
            if session.get(User, owner_id) is None:
                raise NotFound("user")
            consent = session.get(CalibrationConsent, owner_id)
            if not given:
                if consent is not None:
                    session.delete(consent)
                return None
            if consent is None:
                consent = CalibrationConsent(user_id=owner_id, given_at=self._now())
                session.add(consent)
            return consent.given_at

        return await self._database.write(work)

    async def calibration_texts(self) -> list[list[str]]:
        """For each enabled user who allows it, in the order of their ids, the texts of their conversations,
        latest first: the active branch's finished messages with blank lines between them, empty ones left
        out. Deleted conversations are none.
        """
        return await self._database.read(_texts)


def _texts(session: Session) -> list[list[str]]:
    allowed = (
        select(User.id)
        .join(CalibrationConsent, CalibrationConsent.user_id == User.id)
        .where(User.disabled_at.is_(None))
        .order_by(User.id)
    )
    found = []
    for owner_id in session.scalars(allowed).all():
        conversations = (
            select(Conversation.active_leaf_id)
            .where(
                Conversation.user_id == owner_id,
                Conversation.deleted_at.is_(None),
                Conversation.active_leaf_id.is_not(None),
            )
            .order_by(Conversation.updated_at.desc(), Conversation.id)
        )
        texts = [_branch(session, owner_id, leaf) for leaf in session.scalars(conversations).all() if leaf]
        found.append([text for text in texts if text])
    return [texts for texts in found if texts]


def _branch(session: Session, owner_id: str, leaf: str) -> str:
    step = (
        select(Message.seq, Message.parent_id, Message.content, Message.status)
        .where(Message.id == leaf, Message.user_id == owner_id)
        .cte("step", recursive=True)
    )
    parent = aliased(Message)
    step = step.union_all(
        select(parent.seq, parent.parent_id, parent.content, parent.status).where(
            parent.id == step.c.parent_id, parent.user_id == owner_id
        )
    )
    query = select(step.c.content).where(step.c.status.not_in(OPEN_STATUSES)).order_by(step.c.seq)
    return "\n\n".join(content.strip() for content in session.scalars(query) if content.strip())
