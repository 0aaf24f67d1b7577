"""Who is asking: passwords, sign-ins, API keys. Only hashes of secrets reach the database."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import secrets
import time
from dataclasses import dataclass
from functools import cached_property

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from starlette.requests import HTTPConnection

from app.errors import BadRequest, Forbidden, NotSignedIn
from app.throttle import Throttle
from db.store import Store
from db.views import ApiKeyView, UserView

COOKIE = "tangram_session"
KEY_PREFIX = "tc-"
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
MIN_PASSWORD = 8
MAX_PASSWORD = 1024


@dataclass(frozen=True, slots=True)
class SignIn:
    """A new sign-in: the cookie's value, and how long it lasts in seconds."""

    user: UserView
    token: str
    max_age: int


class Accounts:
    """Signs people in and out and recognises them.

    setup_key: lets somebody who is not on this machine create the first account; printed once at start.
    """

    def __init__(self, store: Store, *, session_days: int = 30) -> None:
        self._store = store
        self._session_seconds = session_days * 86400
        self._hasher = PasswordHasher()
        self._throttle = Throttle(limit=10, window=300.0)
        self._by_address = Throttle(limit=30, window=300.0)
        self._hashing = asyncio.Semaphore(2)
        self._has_users = False
        self.setup_key = secrets.token_urlsafe(18)

    @cached_property
    def _absent(self) -> str:
        """A hash that no password matches, to be checked for names that do not exist."""
        return self._hasher.hash(secrets.token_urlsafe(16))

    # ---- first start -------------------------------------------------------------------------

    async def needs_setup(self) -> bool:
        """Whether there is no account yet."""
        if not self._has_users:
            self._has_users = await self._store.count_users() > 0
        return not self._has_users

    async def set_up(self, name: str, password: str, *, key: str, local: bool, client: str) -> SignIn:
        """Create the administrator and sign in. Raises Forbidden, BadRequest, TooManyAttempts, Conflict."""
        if not await self.needs_setup():
            raise Forbidden("This server has its administrator already. Sign in instead.")
        if not local:
            self._throttle.check(client)
            if not hmac.compare_digest(key.encode(), self.setup_key.encode()):
                self._throttle.note(client)
                raise Forbidden("That is not the setup key. The server printed it when it started.")
        self._check_new(name, password)
        hashed = await self._hash(password)
        return await self._sign_in(await self._store.create_first_user(name.strip(), hashed))

    async def create_user(self, name: str, password: str, *, is_admin: bool = False) -> UserView:
        """Add an account. Raises BadRequest, Conflict (db)."""
        self._check_new(name, password)
        return await self._store.create_user(name.strip(), await self._hash(password), is_admin)

    # ---- sign-in -----------------------------------------------------------------------------

    async def sign_in(self, name: str, password: str, *, client: str) -> SignIn:
        """Check a password and open a session. Raises NotSignedIn, TooManyAttempts.

        An unknown name takes as long as a wrong password.
        """
        name = name.strip()
        source = f"{client} {name.casefold()[:100]}"
        self._throttle.check(source)
        self._by_address.check(client)
        self._throttle.note(source)
        self._by_address.note(client)
        user = await self._store.user_by_name(name) if 0 < len(name) <= 64 else None
        usable = user is not None and user.disabled_at is None
        matches = await self._verify(user.password_hash if user and usable else None, password)
        if user is None or not usable or not matches:
            raise NotSignedIn("The name or the password is wrong.")
        self._throttle.forget(source)
        self._by_address.undo(client)
        if self._hasher.check_needs_rehash(user.password_hash):
            await self._store.set_password_hash(user.id, await self._hash(password))
        return await self._sign_in(user)

    async def sign_out(self, token: str) -> None:
        await self._store.delete_session(_digest(token))

    async def identify(self, connection: HTTPConnection) -> UserView | None:
        """The user of a request, by its API key or its session cookie."""
        scheme, _, key = connection.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return await self._store.api_key_user(_digest(key.strip()))
        token = connection.cookies.get(COOKIE)
        return await self._store.session_user(_digest(token)) if token else None

    # ---- API keys ----------------------------------------------------------------------------

    async def create_api_key(self, owner: str, name: str) -> tuple[str, ApiKeyView]:
        """(the key, which nobody can read again; its record)."""
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        return key, await self._store.create_api_key(owner, name, _digest(key))

    # ---- parts -------------------------------------------------------------------------------

    async def _sign_in(self, user: UserView) -> SignIn:
        token = secrets.token_urlsafe(32)
        expires = int(time.time() + self._session_seconds) * 1000
        await self._store.create_session(user.id, _digest(token), expires)
        return SignIn(user, token, self._session_seconds)

    def _check_new(self, name: str, password: str) -> None:
        if not 1 <= len(name.strip()) <= 64 or not name.isprintable():
            raise BadRequest("The name must have 1 to 64 printable characters.", param="name")
        if not MIN_PASSWORD <= len(password) <= MAX_PASSWORD:
            raise BadRequest(f"The password must have at least {MIN_PASSWORD} characters.", param="password")

    async def _hash(self, password: str) -> str:
        async with self._hashing:  # each takes 64 MiB and a core
            return await asyncio.to_thread(self._hasher.hash, password)

    async def _verify(self, hashed: str | None, password: str) -> bool:
        if len(password) > MAX_PASSWORD:
            return False
        async with self._hashing:
            return await asyncio.to_thread(self._matches, hashed, password)

    def _matches(self, hashed: str | None, password: str) -> bool:
        try:
            return self._hasher.verify(hashed if hashed is not None else self._absent, password)
        except (VerificationError, InvalidHashError):
            return False


def _digest(secret: str) -> str:
    """The secrets are random and long, so that a plain hash is enough to keep them."""
    return hashlib.sha256(secret.encode()).hexdigest()


# ---- what a request carries ------------------------------------------------------------------


def user_of(connection: HTTPConnection) -> UserView | None:
    """The user that `app.middleware.Identify` found, or None."""
    user = connection.scope.get("state", {}).get("user")
    return user if isinstance(user, UserView) else None


def current_user(connection: HTTPConnection) -> UserView:
    """FastAPI dependency: the user, or NotSignedIn."""
    user = user_of(connection)
    if user is None:
        raise NotSignedIn
    return user


def current_admin(connection: HTTPConnection) -> UserView:
    """FastAPI dependency: the user if an administrator, else NotSignedIn or Forbidden."""
    user = current_user(connection)
    if not user.is_admin:
        raise Forbidden("Only administrators may do this.")
    return user


async def auth_dependency(request: HTTPConnection) -> str | None:
    """For Gradio's `auth_dependency`: the user's id, which handlers then read from `request.username`."""
    user = user_of(request)
    return user.id if user is not None else None


async def admin_dependency(request: HTTPConnection) -> str | None:
    """As `auth_dependency`, for pages of administrators."""
    user = user_of(request)
    return user.id if user is not None and user.is_admin else None


def is_local(connection: HTTPConnection) -> bool:
    """Whether the request comes from this machine and was addressed to it by a loopback name.

    The second half keeps out web pages that make a browser here talk to us under a foreign name. What came
    through a proxy is never local, whatever address it gives: the proxy may serve the whole network.
    """
    if any(name in connection.headers for name in _FORWARDED):
        return False
    host = connection.url.hostname or ""
    return _is_loopback(connection.client.host if connection.client else "") and (
        host == "localhost" or _is_loopback(host)
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
