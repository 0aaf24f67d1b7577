"""The operator's records: tuned settings and the trail of sign-ins and administrative changes."""

from typing import Any

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from db.errors import InvalidInput, NotFound
from db.models import Audit, Setting, User
from db.repository import Repository
from db.values import checked_json, new_id
from db.views import AuditView


class OperationStore(Repository):
    """The part of the store that belongs to the installation, not to a user."""

    async def get_setting(self, key: str, default: Any = None) -> Any:
        """The value under `key`, or `default`."""

        def work(session: Session) -> Any:
            setting = session.get(Setting, key)
            return default if setting is None else setting.value

        return await self._database.read(work)

    async def set_setting(self, key: str, value: Any) -> None:
        """Store any JSON value under `key`. Raises InvalidInput when it is not JSON."""
        stored = checked_json("value", value)

        def work(session: Session) -> None:
            session.merge(Setting(key=key, value=stored, updated_at=self._now()))

        await self._database.write(work)

    async def add_audit(
        self,
        user_id: str | None,
        action: str,
        before: Any = None,
        after: Any = None,
        *,
        address: str | None = None,
        request_id: str | None = None,
    ) -> AuditView:
        """Record that a user (None: the product itself, or a stranger) signed in or changed something.

        `address` and `request_id` are those of the request that did it. Raises NotFound, InvalidInput.
        """
        before, after = checked_json("before", before), checked_json("after", after)

        def work(session: Session) -> AuditView:
            if user_id is not None and session.get(User, user_id) is None:
                raise NotFound("user")
            row = Audit(
                id=new_id(),
                user_id=user_id,
                action=action,
                before=before,
                after=after,
                created_at=self._now(),
                address=address,
                request_id=request_id,
            )
            session.add(row)
            session.flush()
            return _audit_view(row)

        return await self._database.write(work)

    async def list_audit(self, limit: int = 100) -> list[AuditView]:
        """The latest sign-ins and changes, newest first."""
        if limit < 1:
            raise InvalidInput("limit", "must be at least 1")
        query = select(Audit).order_by(Audit.created_at.desc(), Audit.id).limit(limit)
        return await self._database.read(lambda session: [_audit_view(row) for row in session.scalars(query)])

    async def prune_audit(self, before: int) -> int:
        """Forget what was recorded before a time (ms); return how many there were."""
        old = delete(Audit).where(Audit.created_at < before).returning(Audit.id)
        return await self._database.write(lambda session: len(session.scalars(old).all()))


def _audit_view(row: Audit) -> AuditView:
    return AuditView(
        id=row.id,
        user_id=row.user_id,
        action=row.action,
        before=row.before,
        after=row.after,
        created_at=row.created_at,
        address=row.address,
        request_id=row.request_id,
    )
