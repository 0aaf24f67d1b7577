"""Keys of programs."""

from sqlalchemy import select, update
from sqlalchemy.orm import Session

from db.errors import NotFound
from db.models import ApiKey, User
from db.repository import Repository, execute, existing_user, user_view
from db.sessions import NOTE_USE_EVERY_MS
from db.values import clean_name, new_id
from db.views import ApiKeyView, UserView


class ApiKeyStore(Repository):
    """The part of the store that knows API keys. Only their hashes ever reach it."""

    async def create_api_key(self, owner_id: str, name: str, key_hash: str) -> ApiKeyView:
        """Add an API key of the owner, or raise NotFound."""
        name = clean_name("name", name)

        def work(session: Session) -> ApiKeyView:
            existing_user(session, owner_id)
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
        if found[1] is None or now - found[1] >= NOTE_USE_EVERY_MS:
            note = update(ApiKey).where(ApiKey.key_hash == key_hash).values(last_used_at=now)
            await self._database.write(lambda session: execute(session, note))
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


def _api_key_view(row: ApiKey) -> ApiKeyView:
    return ApiKeyView(
        id=row.id,
        user_id=row.user_id,
        name=row.name,
        created_at=row.created_at,
        last_used_at=row.last_used_at,
        revoked_at=row.revoked_at,
    )
