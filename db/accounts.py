"""Users. Their sign-ins are in `db.sessions`, their keys in `db.api_keys`."""

from typing import Any

from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from db.errors import Conflict, InvalidInput
from db.links import revoke_links
from db.models import ApiKey, Link, LoginSession, Quota, User
from db.quotas import check_quota, quota_view, replace_quota
from db.repository import Repository, add_user, existing_user, user_view
from db.values import clean_name, name_key
from db.views import PersonView, QuotaView, UserChangeView, UserView


class AccountStore(Repository):
    """The part of the store that knows who is who. Only hashes of secrets ever reach it."""

    async def create_user(self, name: str, password_hash: str, is_admin: bool = False) -> UserView:
        """Add a user with a fresh cache salt. Raises Conflict when the name is taken, in any case."""
        name = clean_name("name", name)
        return await self._database.write(
            lambda session: add_user(session, name, password_hash, is_admin, self._now())
        )

    async def create_first_user(self, name: str, password_hash: str) -> UserView:
        """Add the administrator of an empty installation. Raises Conflict when there is any user already."""
        name = clean_name("name", name)

        def work(session: Session) -> UserView:
            if session.scalar(select(func.count()).select_from(User)):
                raise Conflict("there is a user already")
            return add_user(session, name, password_hash, True, self._now())

        return await self._database.write(work)

    async def user_by_name(self, name: str) -> UserView | None:
        """The user of that name, in any case of letters and form of characters, or None.

        Where an older version let several such names in, each is found as it is written.
        """
        try:
            name = clean_name("name", name)
        except InvalidInput:
            return None

        def work(session: Session) -> UserView | None:
            if (exact := _user(session, select(User).where(User.name == name))) is not None:
                return exact
            key = name_key(name)
            alike = [
                own for own, other in session.execute(select(User.id, User.name)) if name_key(other) == key
            ]
            return _user(session, select(User).where(User.id == alike[0])) if len(alike) == 1 else None

        return await self._database.read(work)

    async def user_by_id(self, user_id: str) -> UserView | None:
        """The user of that id, or None."""
        return await self._database.read(
            lambda session: _user(session, select(User).where(User.id == user_id))
        )

    async def count_users(self) -> int:
        """How many users there are, disabled ones included."""
        return await self._database.read(
            lambda session: session.scalar(select(func.count()).select_from(User)) or 0
        )

    async def list_users(self) -> list[PersonView]:
        """All users by name, disabled ones included, as an administrator sees them."""
        now = self._now()

        def work(session: Session) -> list[PersonView]:
            users = session.scalars(select(User).order_by(func.lower(User.name))).all()
            seen = _by_user(
                session,
                select(LoginSession.user_id, func.count(), func.max(LoginSession.last_seen_at))
                .where(LoginSession.expires_at > now)
                .group_by(LoginSession.user_id),
            )
            keys = _by_user(
                session,
                select(ApiKey.user_id, func.count(), func.max(ApiKey.last_used_at))
                .where(ApiKey.revoked_at.is_(None))
                .group_by(ApiKey.user_id),
            )
            quotas = {row.user_id: row for row in session.scalars(select(Quota))}
            return [
                PersonView(
                    id=user.id,
                    name=user.name,
                    is_admin=user.is_admin,
                    created_at=user.created_at,
                    disabled_at=user.disabled_at,
                    last_seen_at=max(seen.get(user.id, _NONE)[1], keys.get(user.id, _NONE)[1]) or None,
                    sessions=seen.get(user.id, _NONE)[0],
                    api_keys=keys.get(user.id, _NONE)[0],
                    quota=quota_view(quotas.get(user.id)),
                )
                for user in users
            ]

        return await self._database.read(work)

    async def set_password_hash(self, user_id: str, password_hash: str, *, end_sessions: bool = True) -> None:
        """Replace the password's hash and end all of the user's sign-ins, or raise NotFound.

        end_sessions: False where only the hash is new, and not the password.
        """

        def work(session: Session) -> None:
            existing_user(session, user_id).password_hash = password_hash
            if end_sessions:
                session.execute(delete(LoginSession).where(LoginSession.user_id == user_id))
                revoke_links(session, self._now(), Link.user_id == user_id)

        await self._database.write(work)

    async def change_user(
        self,
        user_id: str,
        *,
        quota: QuotaView | None = None,
        is_admin: bool | None = None,
        disabled: bool | None = None,
    ) -> UserChangeView:
        """Change what is not None, all or nothing; doing so twice changes nothing.

        Raises NotFound, InvalidInput (quota), and Conflict for the last administrator. Disabling ends the
        user's sign-ins and the links that are open for or by them, and refuses all API keys; enabling lets
        the password and the keys work again.
        """
        if quota is not None:
            check_quota(quota)

        def work(session: Session) -> UserChangeView:
            user, now = existing_user(session, user_id), self._now()
            before, quota_before = user_view(user), quota_view(session.get(Quota, user_id))
            if quota is not None:
                replace_quota(session, user_id, quota, now)
            if is_admin is not None:
                _set_admin(session, user, is_admin, now)
            if disabled:
                _disable(session, user, now)
            elif disabled is not None:
                user.disabled_at = None
            return UserChangeView(before, quota_before, user_view(user))

        return await self._database.write(work)

    async def disable_user(self, user_id: str) -> UserView:
        """Shut a user out, see `change_user`. Raises NotFound, and Conflict for the last administrator."""
        return (await self.change_user(user_id, disabled=True)).after

    async def enable_user(self, user_id: str) -> UserView:
        """Undo `disable_user`. Raises NotFound."""
        return (await self.change_user(user_id, disabled=False)).after

    async def set_admin(self, user_id: str, is_admin: bool) -> UserView:
        """Give or take an administrator's rights. Raises NotFound, and Conflict for the last one."""
        return (await self.change_user(user_id, is_admin=is_admin)).after


def _set_admin(session: Session, user: User, is_admin: bool, now: int) -> None:
    if user.is_admin and not is_admin:
        if user.disabled_at is None:
            _keep_an_administrator(session, user)
        revoke_links(session, now, Link.created_by == user.id)
    user.is_admin = is_admin


def _disable(session: Session, user: User, now: int) -> None:
    if user.disabled_at is None:
        _keep_an_administrator(session, user)
        user.disabled_at = now
    session.execute(delete(LoginSession).where(LoginSession.user_id == user.id))
    revoke_links(session, now, (Link.user_id == user.id) | (Link.created_by == user.id))


_NONE = (0, 0)


def _by_user(session: Session, query: Select[*tuple[Any, ...]]) -> dict[str, tuple[int, int]]:
    return {user: (count, latest or 0) for user, count, latest in session.execute(query)}


def _keep_an_administrator(session: Session, user: User) -> None:
    others = select(func.count()).where(
        User.is_admin.is_(True), User.disabled_at.is_(None), User.id != user.id
    )
    if user.is_admin and not session.scalar(others):
        raise Conflict("the last administrator must stay one")


def _user(session: Session, query: Select[Any]) -> UserView | None:
    user = session.scalars(query).one_or_none()
    return user_view(user) if user is not None else None
