"""Everybody's accounts, as administrators keep them: invitations, resets, who may do what.

`actor` is the administrator who does it; None stands for the command line, whose user owns the database.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from urllib.parse import urlencode

from app.accounts import digest
from app.audit import AuditLog
from app.errors import Missing
from app.fairness import FairQueue
from app.passwords import Passwords, check_new, check_new_password
from db.errors import NotFound
from db.store import Store
from db.views import LinkKind, LinkView, PersonView, QuotaView, UserView

SPENT = "This link has expired or was used already. Ask an administrator for another one."


@dataclass(frozen=True, slots=True)
class IssuedLink:
    """A link that was just made. `path` holds its secret and is shown once; only a hash is stored."""

    link: LinkView
    path: str


class People:
    """What the console and the command line do with accounts. Raises NotFound and Conflict (db) throughout.

    cut_off: called with the id of a user who was disabled, to stop what is running for them.
    """

    def __init__(
        self,
        store: Store,
        passwords: Passwords,
        audit: AuditLog,
        queue: FairQueue,
        *,
        link_hours: int,
        cut_off: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._store = store
        self._passwords = passwords
        self._audit = audit
        self._queue = queue
        self._link_hours = link_hours
        self._cut_off = cut_off

    async def list_users(self) -> list[PersonView]:
        """All accounts, by name."""
        return await self._store.list_users()

    async def load_quotas(self) -> None:
        """Have the queue know what is stored; at start."""
        self._queue.set_quotas(await self._store.list_quotas())

    # ---- invitations and resets --------------------------------------------------------------

    async def invite(
        self, actor: UserView | None, *, is_admin: bool = False, note: str = "", hours: int | None = None
    ) -> IssuedLink:
        """A link with which somebody can make an account, once."""
        token, expires = self._secret(hours)
        link = await self._store.create_invitation(
            digest(token), expires, is_admin=is_admin, note=note, created_by=_id(actor)
        )
        await self._audit.record(
            _id(actor), "user.invite", None, {"link": link.id, "is_admin": is_admin, "note": link.note}
        )
        return IssuedLink(link, _path("invite", token))

    async def create(
        self, actor: UserView | None, name: str, password: str, *, is_admin: bool = False
    ) -> UserView:
        """An account without an invitation; its password is told otherwise. Raises BadRequest, Conflict."""
        check_new(name, password)
        hashed = await self._passwords.hash(password)
        user = await self._store.create_user(name.strip(), hashed, is_admin)
        made = {"user_id": user.id, "name": user.name, "is_admin": is_admin}
        await self._audit.record(_id(actor), "user.create", None, made)
        return user

    async def reset_password(
        self, actor: UserView | None, user_id: str, *, hours: int | None = None
    ) -> IssuedLink:
        """A link with which a user chooses another password, once. The user's sign-ins end now."""
        token, expires = self._secret(hours)
        link = await self._store.create_reset(user_id, digest(token), expires, created_by=_id(actor))
        await self._audit.record(_id(actor), "user.reset", None, {"user_id": user_id, "link": link.id})
        return IssuedLink(link, _path("reset", token))

    async def find_link(self, kind: LinkKind, token: str) -> LinkView:
        """The link of a token. Raises Missing when it cannot be used (any more)."""
        link = await self._store.open_link(kind, digest(token))
        if link is None:
            raise Missing(SPENT)
        return link

    async def accept_invitation(self, token: str, name: str, password: str) -> UserView:
        """Make the account that an invitation is for. Raises Missing, BadRequest, Conflict (name taken)."""
        await self.find_link("invite", token)
        check_new(name, password)
        hashed = await self._passwords.hash(password)
        try:
            user = await self._store.accept_invitation(digest(token), name.strip(), hashed)
        except NotFound as error:  # somebody else was quicker
            raise Missing(SPENT) from error
        await self._audit.record(user.id, "user.join", None, {"name": user.name, "is_admin": user.is_admin})
        return user

    async def accept_reset(self, token: str, password: str) -> UserView:
        """Give the password that a reset asks for. Raises Missing, BadRequest."""
        await self.find_link("reset", token)
        check_new_password(password)
        hashed = await self._passwords.hash(password)
        try:
            user = await self._store.accept_reset(digest(token), hashed)
        except NotFound as error:
            raise Missing(SPENT) from error
        await self._audit.record(user.id, "password.reset")
        return user

    async def list_links(self) -> list[LinkView]:
        """Invitations and resets that can still be used, newest first."""
        return await self._store.list_links()

    async def revoke_link(self, actor: UserView | None, link_id: str) -> None:
        """Refuse a link from now on."""
        link = await self._store.revoke_link(link_id)
        await self._audit.record(_id(actor), "link.revoke", {"link": link.id, "kind": link.kind})

    # ---- accounts ----------------------------------------------------------------------------

    async def change(
        self,
        actor: UserView | None,
        user_id: str,
        *,
        quota: QuotaView | None = None,
        is_admin: bool | None = None,
        disabled: bool | None = None,
    ) -> UserView:
        """Change what is not None, all or nothing, from now on. Raises InvalidInput (db) for a quota."""
        change = await self._store.change_user(user_id, quota=quota, is_admin=is_admin, disabled=disabled)
        who, user = _id(actor), change.after
        if quota is not None:
            self._queue.set_quota(user_id, quota)
            was, new = ({"user_id": user_id, **asdict(each)} for each in (change.quota_before, quota))
            await self._audit.record(who, "user.quota", was, new)
        if is_admin is not None:
            was = {"user_id": user_id, "is_admin": change.before.is_admin}
            await self._audit.record(who, "user.admin", was, was | {"is_admin": is_admin})
        named = {"user_id": user_id, "name": user.name}
        if disabled:
            self._queue.shut_out(user_id)  # first: a request of a moment ago may be about to join
            await self._audit.record(who, "user.disable", named)
            if self._cut_off is not None:
                await self._cut_off(user_id)
        elif disabled is not None:
            self._queue.let_in(user_id)
            await self._audit.record(who, "user.enable", None, named)
        return user

    async def disable(self, actor: UserView | None, user_id: str) -> UserView:
        """Shut a user out: sign-ins, keys, links and running replies end now; the history stays."""
        return await self.change(actor, user_id, disabled=True)

    async def enable(self, actor: UserView | None, user_id: str) -> UserView:
        """Let a user in again, with the same password and keys."""
        return await self.change(actor, user_id, disabled=False)

    async def end_sessions(self, actor: UserView | None, user_id: str) -> int:
        """End all of a user's sign-ins; how many there were."""
        ended = await self._store.revoke_sessions(user_id)
        await self._audit.record(_id(actor), "user.end_sessions", {"user_id": user_id, "sessions": ended})
        return ended

    async def revoke_keys(self, actor: UserView | None, user_id: str) -> int:
        """Refuse all of a user's API keys from now on; how many there were."""
        keys = [key for key in await self._store.list_api_keys(user_id) if key.revoked_at is None]
        for key in keys:
            await self._store.revoke_api_key(user_id, key.id)
        names = [key.name for key in keys]
        await self._audit.record(_id(actor), "user.revoke_keys", {"user_id": user_id, "keys": names})
        return len(keys)

    async def set_admin(self, actor: UserView | None, user_id: str, is_admin: bool) -> UserView:
        """Give or take an administrator's rights."""
        return await self.change(actor, user_id, is_admin=is_admin)

    async def set_quota(self, actor: UserView | None, user_id: str, quota: QuotaView) -> QuotaView:
        """Change what a user may do at once, from now on. Raises InvalidInput (db)."""
        await self.change(actor, user_id, quota=quota)
        return quota

    def _secret(self, hours: int | None) -> tuple[str, int]:
        """(a token, when it expires in ms)."""
        seconds = 3600 * (self._link_hours if hours is None else hours)
        return secrets.token_urlsafe(24), int(time.time() + seconds) * 1000


def _id(actor: UserView | None) -> str | None:
    return actor.id if actor is not None else None


def _path(page: str, token: str) -> str:
    return f"/{page}?{urlencode({'token': token})}"
