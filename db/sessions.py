"""Sign-ins of browsers."""

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.orm import Session

from db.errors import NotFound
from db.models import LoginSession, User
from db.repository import Repository, execute, existing_user, user_view
from db.values import clean_text, new_id
from db.views import SessionView, UserView

# A look-up that notes "seen now" on every request would turn every read into a write.
NOTE_USE_EVERY_MS = 60_000
_MAX_AGENT = 300


class SessionStore(Repository):
    """The part of the store that knows sign-ins. Only hashes of tokens ever reach it."""

    async def create_session(
        self, user_id: str, token_hash: str, expires_at: int, *, address: str = "", user_agent: str = ""
    ) -> SessionView:
        """Remember a sign-in until `expires_at` (ms), and forget expired ones. Raises NotFound."""

        def work(session: Session) -> SessionView:
            existing_user(session, user_id)
            now = self._now()
            session.execute(delete(LoginSession).where(LoginSession.expires_at <= now))
            row = LoginSession(
                token_hash=token_hash,
                user_id=user_id,
                created_at=now,
                expires_at=expires_at,
                last_seen_at=now,
                id=new_id(),
                address=clean_text(address)[:_MAX_AGENT],
                user_agent=clean_text(user_agent)[:_MAX_AGENT],
            )
            session.add(row)
            session.flush()
            return _session_view(row)

        return await self._database.write(work)

    async def session_user(self, token_hash: str) -> UserView | None:
        """The enabled user of a sign-in that has not expired, or None."""
        found = await self.session_and_user(token_hash)
        return found[1] if found is not None else None

    async def session_and_user(self, token_hash: str) -> tuple[str, UserView] | None:
        """(the sign-in's id, its user) when it has not expired and the user is enabled, or None."""
        now = self._now()

        def look_up(session: Session) -> tuple[UserView, int, str] | None:
            found = session.execute(
                select(User, LoginSession.last_seen_at, LoginSession.id)
                .join(LoginSession, LoginSession.user_id == User.id)
                .where(
                    LoginSession.token_hash == token_hash,
                    LoginSession.expires_at > now,
                    User.disabled_at.is_(None),
                )
            ).one_or_none()
            return found and (user_view(found[0]), found[1], found[2])

        found = await self._database.read(look_up)
        if found is None:
            return None
        if now - found[1] >= NOTE_USE_EVERY_MS:
            note = update(LoginSession).where(LoginSession.token_hash == token_hash).values(last_seen_at=now)
            await self._database.write(lambda session: execute(session, note))
        return found[2], found[0]

    async def list_sessions(self, owner_id: str) -> list[SessionView]:
        """The owner's sign-ins that have not expired, the latest used first."""
        query = (
            select(LoginSession)
            .where(LoginSession.user_id == owner_id, LoginSession.expires_at > self._now())
            .order_by(LoginSession.last_seen_at.desc(), LoginSession.id)
        )
        return await self._database.read(
            lambda session: [_session_view(row) for row in session.scalars(query)]
        )

    async def revoke_session(self, owner_id: str, session_id: str) -> None:
        """End one of the owner's sign-ins, or raise NotFound."""
        query = delete(LoginSession).where(LoginSession.id == session_id, LoginSession.user_id == owner_id)

        def work(session: Session) -> None:
            if not session.scalars(query.returning(LoginSession.id)).all():
                raise NotFound("session")

        await self._database.write(work)

    async def revoke_sessions(self, owner_id: str, but: str | None = None) -> int:
        """End all of the owner's sign-ins, save the one with the id `but`; return how many there were."""
        which: list[ColumnElement[bool]] = [LoginSession.user_id == owner_id]
        if but is not None:
            which.append(LoginSession.id != but)
        query = delete(LoginSession).where(*which).returning(LoginSession.id)
        return await self._database.write(lambda session: len(session.scalars(query).all()))

    async def delete_session(self, token_hash: str) -> None:
        """Forget a sign-in. Forgetting an unknown one is no error."""
        forget = delete(LoginSession).where(LoginSession.token_hash == token_hash)
        await self._database.write(lambda session: execute(session, forget))


def _session_view(row: LoginSession) -> SessionView:
    return SessionView(
        id=row.id,
        user_id=row.user_id,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_seen_at=row.last_seen_at,
        address=row.address,
        user_agent=row.user_agent,
    )
