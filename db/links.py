"""Links that work once: invitations, and resets of a password."""

from sqlalchemy import ColumnElement, delete, select, update
from sqlalchemy.orm import Session

from db.errors import Conflict, NotFound
from db.models import Link, LoginSession, User
from db.repository import Repository, add_user, existing_user, user_view
from db.values import clean_name, new_id
from db.views import LinkKind, LinkView, UserView

_KEEP_SPENT_MS = 90 * 86_400_000


class LinkStore(Repository):
    """The part of the store that knows links. Only hashes of their tokens ever reach it."""

    async def create_invitation(
        self, token_hash: str, expires_at: int, *, is_admin: bool, note: str, created_by: str | None
    ) -> LinkView:
        """Add an invitation until `expires_at` (ms). `note` says, to the administrator, whom it is for."""
        note = clean_name("note", note) if note.strip() else ""
        return await self._database.write(
            lambda session: self._add(
                session,
                Link(
                    id=new_id(),
                    token_hash=token_hash,
                    kind="invite",
                    is_admin=is_admin,
                    note=note,
                    created_by=created_by,
                    created_at=self._now(),
                    expires_at=expires_at,
                ),
            )
        )

    async def create_reset(
        self, user_id: str, token_hash: str, expires_at: int, *, created_by: str | None
    ) -> LinkView:
        """Add a reset of the user's password, in the place of earlier ones, and end the user's sign-ins.

        Raises NotFound, and Conflict for a user who is disabled.
        """

        def work(session: Session) -> LinkView:
            user = existing_user(session, user_id)
            if user.disabled_at is not None:
                raise Conflict("the user is disabled")
            now = self._now()
            revoke_links(session, now, Link.user_id == user_id)
            session.execute(delete(LoginSession).where(LoginSession.user_id == user_id))
            return self._add(
                session,
                Link(
                    id=new_id(),
                    token_hash=token_hash,
                    kind="reset",
                    user_id=user_id,
                    is_admin=user.is_admin,
                    note="",
                    created_by=created_by,
                    created_at=now,
                    expires_at=expires_at,
                ),
            )

        return await self._database.write(work)

    async def open_link(self, kind: LinkKind, token_hash: str) -> LinkView | None:
        """The link of that token if it can still be used, or None."""

        def work(session: Session) -> LinkView | None:
            row = self._open(session, kind, token_hash)
            return _link_view(row) if row is not None else None

        return await self._database.read(work)

    async def accept_invitation(self, token_hash: str, name: str, password_hash: str) -> UserView:
        """Use an invitation up and add its user. Raises NotFound when it cannot be used, Conflict (name)."""
        name = clean_name("name", name)

        def work(session: Session) -> UserView:
            link = self._open(session, "invite", token_hash)
            if link is None:
                raise NotFound("invitation")
            user = add_user(session, name, password_hash, link.is_admin, self._now())
            link.used_at, link.user_id = self._now(), user.id
            return user

        return await self._database.write(work)

    async def accept_reset(self, token_hash: str, password_hash: str) -> UserView:
        """Use a reset up, give its user the new password and end all sign-ins. Raises NotFound."""

        def work(session: Session) -> UserView:
            link = self._open(session, "reset", token_hash)
            if link is None or link.user_id is None:
                raise NotFound("reset")
            user = existing_user(session, link.user_id)
            user.password_hash = password_hash
            link.used_at = self._now()
            session.execute(delete(LoginSession).where(LoginSession.user_id == user.id))
            return user_view(user)

        return await self._database.write(work)

    async def list_links(self) -> list[LinkView]:
        """The links that can still be used, newest first."""
        query = (
            select(Link)
            .where(Link.used_at.is_(None), Link.revoked_at.is_(None), Link.expires_at > self._now())
            .order_by(Link.created_at.desc(), Link.id)
        )
        return await self._database.read(lambda session: [_link_view(row) for row in session.scalars(query)])

    async def revoke_link(self, link_id: str) -> LinkView:
        """Refuse a link from now on, or raise NotFound. One that is spent stays as it is."""

        def work(session: Session) -> LinkView:
            link = session.get(Link, link_id)
            if link is None:
                raise NotFound("link")
            if link.used_at is None and link.revoked_at is None:
                link.revoked_at = self._now()
            return _link_view(link)

        return await self._database.write(work)

    def _add(self, session: Session, link: Link) -> LinkView:
        session.execute(delete(Link).where(Link.expires_at < self._now() - _KEEP_SPENT_MS))
        session.add(link)
        session.flush()
        return _link_view(link)

    def _open(self, session: Session, kind: LinkKind, token_hash: str) -> Link | None:
        query = select(Link).where(
            Link.token_hash == token_hash,
            Link.kind == kind,
            Link.used_at.is_(None),
            Link.revoked_at.is_(None),
            Link.expires_at > self._now(),
        )
        if kind == "reset":
            query = query.join(User, User.id == Link.user_id).where(User.disabled_at.is_(None))
        return session.scalars(query).one_or_none()


def revoke_links(session: Session, now: int, *which: ColumnElement[bool]) -> None:
    """Refuse the open links that the conditions choose."""
    session.execute(
        update(Link).where(Link.used_at.is_(None), Link.revoked_at.is_(None), *which).values(revoked_at=now)
    )


def _link_view(row: Link) -> LinkView:
    return LinkView(
        id=row.id,
        kind="reset" if row.kind == "reset" else "invite",
        user_id=row.user_id,
        is_admin=row.is_admin,
        note=row.note,
        created_by=row.created_by,
        created_at=row.created_at,
        expires_at=row.expires_at,
        used_at=row.used_at,
        revoked_at=row.revoked_at,
    )
