"""What each user may do at once, where it differs from the installation's defaults."""

from sqlalchemy import select
from sqlalchemy.orm import Session

from db.errors import InvalidInput
from db.models import Quota
from db.repository import Repository, existing_user
from db.views import QuotaView

_LEAST = {"running": 1, "waiting": 0, "per_minute": 1}
_MOST = 1_000_000


class QuotaStore(Repository):
    """The part of the store that knows quotas."""

    async def set_quota(self, user_id: str, quota: QuotaView) -> QuotaView:
        """Replace a user's quota and return the one before. Raises NotFound, InvalidInput."""
        check_quota(quota)

        def work(session: Session) -> QuotaView:
            existing_user(session, user_id)
            return replace_quota(session, user_id, quota, self._now())

        return await self._database.write(work)

    async def list_quotas(self) -> dict[str, QuotaView]:
        """All quotas by user id; users with the defaults are left out."""

        def work(session: Session) -> dict[str, QuotaView]:
            return {row.user_id: quota_view(row) for row in session.scalars(select(Quota))}

        return await self._database.read(work)


def check_quota(quota: QuotaView) -> None:
    """Raises InvalidInput for a limit that makes no sense."""
    for name, least in _LEAST.items():
        value = getattr(quota, name)
        if value is not None and not least <= value <= _MOST:
            raise InvalidInput(name, f"must be from {least} to {_MOST}, or null for the default")


def replace_quota(session: Session, user_id: str, quota: QuotaView, now: int) -> QuotaView:
    """Replace an existing user's quota and return the one before."""
    row = session.get(Quota, user_id)
    before = quota_view(row)
    if row is None:
        row = Quota(user_id=user_id)
        session.add(row)
    row.running, row.waiting, row.per_minute = quota.running, quota.waiting, quota.per_minute
    row.updated_at = now
    return before


def quota_view(row: Quota | None) -> QuotaView:
    """The record of a quota; without a row, all defaults."""
    return QuotaView() if row is None else QuotaView(row.running, row.waiting, row.per_minute)
