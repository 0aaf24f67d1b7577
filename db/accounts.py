"""Users, their sign-ins and their API keys."""

import secrets
from typing import Any

from sqlalchemy import Select, delete, func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db.errors import Conflict, InvalidInput, NotFound
from db.models import ApiKey, LoginSession, User
from db.repository import Repository
from db.values import clean_name, new_id
from db.views import ApiKeyView, UserView

# A look-up that notes "seen now" on every request would turn every read into a write.
_NOTE_USE_EVERY_MS = 60_000


class AccountStore(Repository):
    """The part of the store that knows who is who. Only hashes of secrets ever reach it."""

    async def create_user(self, name: str, password_hash: str, is_admin: bool = False) -> UserView:
        """Add a user with a fresh cache salt. Raises Conflict when the name is taken, in any case."""
        name = clean_name("name", name)
        return await self._database.write(
            lambda session: self._add_user(session, name, password_hash, is_admin)
        )

    async def create_first_user(self, name: str, password_hash: str) -> UserView:
        """Add the administrator of an empty installation. Raises Conflict when there is any user already."""
        name = clean_name("name", name)

        def work(session: Session) -> UserView:
            if session.scalar(select(func.count()).select_from(User)):
                raise Conflict("there is a user already")
            return self._add_user(session, name, password_hash, True)

        return await self._database.write(work)

    async def user_by_name(self, name: str) -> UserView | None:
        """The user of that name, in any case of letters, or None."""
        try:
            name = clean_name("name", name)
        except InvalidInput:
            return None
        return await self._database.read(
            lambda session: _user(session, select(User).where(User.name == name))
        )

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

    async def set_password_hash(self, user_id: str, password_hash: str) -> None:
        """Replace the password's hash and end all of the user's sign-ins, or raise NotFound."""

        def work(session: Session) -> None:
            _existing_user(session, user_id).password_hash = password_hash
            session.execute(delete(LoginSession).where(LoginSession.user_id == user_id))

        await self._database.write(work)

    async def disable_user(self, user_id: str) -> None:
        """End the user's sign-ins and refuse new ones and all API keys, or raise NotFound."""

        def work(session: Session) -> None:
            _existing_user(session, user_id).disabled_at = self._now()
            session.execute(delete(LoginSession).where(LoginSession.user_id == user_id))

        await self._database.write(work)

    async def create_session(self, user_id: str, token_hash: str, expires_at: int) -> None:
        """Remember a sign-in until `expires_at` (ms), and forget expired ones. Raises NotFound."""

        def work(session: Session) -> None:
            _existing_user(session, user_id)
            now = self._now()
            session.execute(delete(LoginSession).where(LoginSession.expires_at <= now))
            session.add(
                LoginSession(
                    token_hash=token_hash,
                    user_id=user_id,
                    created_at=now,
                    expires_at=expires_at,
                    last_seen_at=now,
                )
            )

        await self._database.write(work)

    async def session_user(self, token_hash: str) -> UserView | None:
        """The enabled user of a sign-in that has not expired, or None."""
        now = self._now()

        def look_up(session: Session) -> tuple[UserView, int] | None:
            found = session.execute(
                select(User, LoginSession.last_seen_at)
                .join(LoginSession, LoginSession.user_id == User.id)
                .where(
                    LoginSession.token_hash == token_hash,
                    LoginSession.expires_at > now,
                    User.disabled_at.is_(None),
                )
            ).one_or_none()
            return found and (user_view(found[0]), found[1])

        found = await self._database.read(look_up)
        if found is None:
            return None
        if now - found[1] >= _NOTE_USE_EVERY_MS:
            note = update(LoginSession).where(LoginSession.token_hash == token_hash).values(last_seen_at=now)
            await self._database.write(lambda session: _execute(session, note))
        return found[0]

    async def delete_session(self, token_hash: str) -> None:
        """Forget a sign-in. Forgetting an unknown one is no error."""
        forget = delete(LoginSession).where(LoginSession.token_hash == token_hash)
        await self._database.write(lambda session: _execute(session, forget))

    async def create_api_key(self, owner_id: str, name: str, key_hash: str) -> ApiKeyView:
        """Add an API key of the owner, or raise NotFound."""
        name = clean_name("name", name)

        def work(session: Session) -> ApiKeyView:
            _existing_user(session, owner_id)
            key = ApiKey(id=new_id(), user_id=owner_id, name=name, key_hash=key_hash, created_at=self._now())
            session.add(key)
            session.flush()
            return _api_key_view(key)

        return await self._database.write(work)

    async def api_key_user(self, key_hash: str) -> UserView | None:
        """The enabled user of an API key that is not revoked, or None."""
        now = self._now()

        def look_up(session: Session) -> tuple[UserView, int | None] | None:
            found = session.execute(
                select(User, ApiKey.last_used_at)
                .join(ApiKey, ApiKey.user_id == User.id)
                .where(ApiKey.key_hash == key_hash, ApiKey.revoked_at.is_(None), User.disabled_at.is_(None))
            ).one_or_none()
            return found and (user_view(found[0]), found[1])

        found = await self._database.read(look_up)
        if found is None:
            return None
        if found[1] is None or now - found[1] >= _NOTE_USE_EVERY_MS:
            note = update(ApiKey).where(ApiKey.key_hash == key_hash).values(last_used_at=now)
            await self._database.write(lambda session: _execute(session, note))
        return found[0]

    async def list_api_keys(self, owner_id: str) -> list[ApiKeyView]:
        """The owner's API keys, revoked ones included, newest first."""
        query = select(ApiKey).where(ApiKey.user_id == owner_id).order_by(ApiKey.created_at.desc(), ApiKey.id)
        return await self._database.read(
            lambda session: [_api_key_view(key) for key in session.scalars(query)]
        )

    async def revoke_api_key(self, owner_id: str, key_id: str) -> ApiKeyView:
        """Refuse the owner's API key from now on, or raise NotFound. Revoking twice changes nothing."""

        def work(session: Session) -> ApiKeyView:
            key = session.scalars(
                select(ApiKey).where(ApiKey.id == key_id, ApiKey.user_id == owner_id)
            ).one_or_none()
            if key is None:
                raise NotFound("API key")
            if key.revoked_at is None:
                key.revoked_at = self._now()
            return _api_key_view(key)

        return await self._database.write(work)

    def _add_user(self, session: Session, name: str, password_hash: str, is_admin: bool) -> UserView:
        user = User(
            id=new_id(),
            name=name,
            password_hash=password_hash,
            is_admin=is_admin,
            cache_salt=secrets.token_hex(32),
            created_at=self._now(),
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


def _user(session: Session, query: Select[Any]) -> UserView | None:
    user = session.scalars(query).one_or_none()
    return user_view(user) if user is not None else None


def _existing_user(session: Session, user_id: str) -> User:
    user = session.get(User, user_id)
    if user is None:
        raise NotFound("user")
    return user


def _execute(session: Session, statement: Any) -> None:
    session.execute(statement)


def _api_key_view(row: ApiKey) -> ApiKeyView:
    return ApiKeyView(
        id=row.id,
        user_id=row.user_id,
        name=row.name,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
